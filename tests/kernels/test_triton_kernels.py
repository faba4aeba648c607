"""Every Triton kernel against its reference, in Triton's interpreter."""

import pytest
from interpreter import errors_of


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return errors_of("triton_cases.py")


KERNELS = [
    "adamw",
    "spread_rows",
    "gather_sum",
    "weighted_swiglu",
    "weighted_swiglu_backward",
    "stash_rows",
    "sort_pairs",
    "route",
    "route_backward",
    "partial_cross_entropy",
    "cross_entropy_backward",
    "document_attention",
    "document_attention_backward",
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_reference(errors, kernel) -> None:
    """Errors come in units of the type's rounding."""
    of_kernel = {case: error for case, error in errors.items() if case.startswith(kernel + " ")}
    assert len(of_kernel) >= 10
    assert not {case: error for case, error in of_kernel.items() if not error <= 1}
