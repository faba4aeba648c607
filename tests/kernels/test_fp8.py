"""The FP8 kernels: every Triton kernel against its reference in Triton's interpreter, and the ops as PyTorch sees them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import quantize, swiglu_fp8

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("fp8_cases.py"))
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


EXACT = ["quantize_rows", "spread_rows_fp8", "quantize_columns", "quantize_tiles"]
ROUNDED = ["weighted_swiglu_fp8", "weighted_swiglu_fp8_backward"]


@pytest.mark.parametrize("kernel", EXACT + ROUNDED)
def test_kernel_equals_reference(errors, kernel) -> None:
    """Quantisers bit for bit, as both round to nearest; others within a rounding of their results."""
    of_kernel = {case: error for case, error in errors.items() if case.startswith(kernel + " ")}
    assert len(of_kernel) >= 10
    assert not {case: error for case, error in of_kernel.items() if not error <= (kernel in ROUNDED)}


def offsets(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("blockwise", [False, True])
def test_quantisers_are_registered_correctly(blockwise) -> None:
    x, ends = torch.randn(6, 256).bfloat16(), offsets([2, 0, 3])
    check = torch.library.opcheck
    # What is unspecified may differ from one call to the next: of the tests of an op all but those that compare its results.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    check(quantize.quantize_rows, (x, torch.tensor([6]), blockwise), test_utils=tests)
    check(quantize.spread_rows_fp8, (x, torch.arange(12).view(6, 2).flip(0), 12, blockwise), test_utils=tests)
    check(quantize.quantize_columns, (x, ends, blockwise), test_utils=tests)
    check(quantize.quantize_columns, (x, ends, blockwise, torch.arange(7), 2), test_utils=tests)
    check(quantize.quantize_tiles, (torch.randn(2, 256, 128), blockwise), test_utils=tests)
    arguments = torch.randn(5, 2, 128), torch.rand(8), torch.tensor([6, 0, 3, 7, -1], dtype=torch.int32), torch.tensor([4])
    check(swiglu_fp8.weighted_swiglu_fp8, (*arguments, blockwise), test_utils=tests)
    check(swiglu_fp8.weighted_swiglu_fp8_backward, (torch.randn(5, 128), *arguments, blockwise), test_utils=tests)


@pytest.mark.parametrize(("blockwise", "N", "K"), [(False, 144, 80), (True, 256, 128)])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantized_weights(blockwise, N, K, transposed) -> None:
    """Elements times scales are the weight up to half a step of E4M3, in either direction."""
    w_ENK = torch.randn(3, N, K)
    elements, scale = quantize.quantize_weights(w_ENK, blockwise, transposed)
    wanted = w_ENK.transpose(1, 2) if transposed else w_ENK
    assert elements.shape == wanted.shape and elements.stride(2) == 1
    if blockwise:
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        wide = scale[:, :, None]
    assert scale.shape == ((3, *(n // 128 for n in wanted.shape[1:])) if blockwise else wanted.shape[:2])
    error = (elements.float() * wide - wanted).abs()
    assert (error <= wanted.abs() / 16 + wide / 1024).all() and error.any()
