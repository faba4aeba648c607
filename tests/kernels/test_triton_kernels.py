"""Every Triton kernel against its reference, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("triton_cases.py"))
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


KERNELS = [
    "adamw",
    "spread_rows",
    "gather_sum",
    "weighted_swiglu",
    "weighted_swiglu_backward",
    "grouped_mm",
    "weight_grad",
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
