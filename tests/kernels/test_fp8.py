"""The FP8 kernels: every Triton kernel against its reference in Triton's interpreter, and the ops as PyTorch sees them."""

import subprocess
import sys

import pytest
import torch
from interpreter import errors_of

from benchmarks.grouped_products import of_weight_grad
from kernels import grouped_mm_fp8, packed_tokens, quantize, swiglu_fp8, turn_rows


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return errors_of("fp8_cases.py")


PACKED = ["pack_tokens", "spread_packed", "spread_and_pack"]
EXACT = ["quantize_rows", "spread_rows_fp8", "quantize_tiles", "add_parts", "weighted_swiglu_rowwise_backward", *PACKED]
ROUNDED = ["weighted_swiglu_fp8", "weighted_swiglu_fp8_backward"]


@pytest.mark.parametrize("kernel", EXACT + ROUNDED)
def test_kernel_equals_reference(errors, kernel) -> None:
    """Quantisers bit for bit, as both round to nearest; others within a rounding of their results."""
    of_kernel = {case: error for case, error in errors.items() if case.startswith(kernel + " ")}
    assert len(of_kernel) >= (3 if kernel == "add_parts" else 10)
    assert not {case: error for case, error in of_kernel.items() if not error <= (kernel in ROUNDED)}


# What is unspecified may differ from one call to the next: of the tests of an op all but that which compares its results.
OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def offsets(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("blockwise", [False, True])
def test_quantisers_are_registered_correctly(blockwise) -> None:
    x, ends = torch.randn(6, 256).bfloat16(), offsets([2, 0, 3])
    check = torch.library.opcheck
    check(quantize.quantize_rows, (x, torch.tensor([6]), blockwise), test_utils=OPCHECKS)
    check(quantize.spread_rows_fp8, (x, torch.arange(12).view(6, 2).flip(0), 12, blockwise), test_utils=OPCHECKS)
    check(quantize.quantize_columns, (x, ends, blockwise), test_utils=OPCHECKS)
    check(quantize.quantize_columns, (x, ends, blockwise, torch.arange(7), 2), test_utils=OPCHECKS)
    check(turn_rows.turn_rows, (*quantize.quantize_rows(x, ends[-1:], False), ends), test_utils=OPCHECKS[1:])
    words = packed_tokens.pack_tokens(x, blockwise)
    for num_rows in (None, torch.tensor([4])):
        check(packed_tokens.pack_tokens, (x, blockwise, num_rows), test_utils=OPCHECKS)
    check(packed_tokens.spread_and_pack, (x, torch.arange(12).view(6, 2).flip(0), 12, blockwise), test_utils=OPCHECKS)
    check(packed_tokens.spread_packed, (words, torch.arange(12).view(6, 2).flip(0), 12, 256, blockwise), test_utils=OPCHECKS)
    if blockwise:
        check(packed_tokens.quantize_packed_columns, (words, 256, ends, torch.arange(7), 2), test_utils=OPCHECKS)
    check(quantize.quantize_tiles, (torch.randn(2, 256, 128), blockwise), test_utils=OPCHECKS)
    arguments = torch.randn(5, 2, 128), torch.rand(8), torch.tensor([6, 0, 3, 7, -1], dtype=torch.int32), torch.tensor([4])
    check(swiglu_fp8.weighted_swiglu_fp8, (*arguments, blockwise), test_utils=OPCHECKS)
    check(swiglu_fp8.weighted_swiglu_fp8_backward, (torch.randn(5, 128), *arguments, blockwise), test_utils=OPCHECKS)
    check(swiglu_fp8.weighted_swiglu_rowwise_backward, (torch.randn(5, 128), *arguments), test_utils=OPCHECKS)
    stashed = torch.randn(5, 128), packed_tokens.pack_tokens(torch.randn(9, 256), blockwise), *arguments[1:], blockwise
    check(swiglu_fp8.weighted_swiglu_fp8_backward, (*stashed, torch.tensor([2])), test_utils=OPCHECKS)


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


@pytest.mark.parametrize("blockwise", [False, True])
def test_products_are_those_of_the_operands(blockwise) -> None:
    """Against fp64 products of elements times scales, and as PyTorch sees the ops."""
    groups, N, K = [3, 0, 130, 1], 128, 256
    ends, rows = offsets(groups), sum(groups)
    expert_R = torch.repeat_interleave(torch.arange(4), torch.tensor(groups))
    x_RK, grad_RN, w_ENK = torch.randn(rows + 2, K), torch.randn(rows + 2, N), torch.randn(4, N, K)
    a, b = quantize.quantize_rows(x_RK, ends[-1:], blockwise), quantize.quantize_weights(w_ENK, blockwise, False)
    out_RN = grouped_mm_fp8.grouped_mm_fp8(*a, *b, ends, blockwise)
    if blockwise:
        wide = a[1].t().repeat_interleave(128, 1), b[1].repeat_interleave(128, 1).repeat_interleave(128, 2)
    else:
        wide = a[1][:, None], b[1][:, :, None]
    a_RK, b_ENK = (elements.double() * scale for (elements, _), scale in zip((a, b), wide, strict=True))
    assert close(out_RN[:rows], torch.einsum("rk,rnk->rn", a_RK[:rows], b_ENK[expert_R]))
    assert (
        0.01 < ((out_RN[:rows] - torch.einsum("rk,rnk->rn", x_RK[:rows], w_ENK[expert_R])).norm() / out_RN[:rows].norm()) < 0.06
    )

    operands = *of_weight_grad(grad_RN, ends, blockwise)[:2], *of_weight_grad(x_RK, ends, blockwise)
    grad_ENK = grouped_mm_fp8.grouped_mm_fp8_weight_grad(*operands, blockwise)
    exact = torch.zeros(4, N, K).index_add(0, expert_R, grad_RN[:rows, :, None] * x_RK[:rows, None, :])
    assert ((grad_ENK - exact).norm() / exact.norm()) < 0.06 and not grad_ENK[1].any()

    # The first of the tests does arithmetic on arguments, which torch has none of for E4M3.
    torch.library.opcheck(grouped_mm_fp8._grouped_mm_fp8, (*a, *b, ends, blockwise), test_utils=OPCHECKS[1:])
    torch.library.opcheck(grouped_mm_fp8._grouped_mm_fp8_weight_grad, (*operands, blockwise), test_utils=OPCHECKS[1:])


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 129, 5000])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_weight_grad_in_parts(monkeypatch, multiprocessors, rows, blockwise) -> None:
    """Of one group, whose sum many multiprocessors take in parts: the same but for roundings to bf16."""
    monkeypatch.setattr(grouped_mm_fp8, "multiprocessors", lambda _: multiprocessors)
    launched = []
    product = grouped_mm_fp8.grouped_mm_fp8_weight_grad
    monkeypatch.setattr(grouped_mm_fp8, "grouped_mm_fp8_weight_grad", lambda *a: launched.append(a[4].tolist()) or product(*a))
    grad_RN, x_RK, ends = torch.randn(rows, 256), torch.randn(rows, 128), offsets([rows])
    *grad, (x_KW, x_scale, end) = *of_weight_grad(grad_RN, ends, blockwise)[:2], of_weight_grad(x_RK, ends, blockwise)
    operands = *grad, x_KW, x_scale
    actual = grouped_mm_fp8.mm_fp8_weight_grad(*operands, rows, blockwise)
    wanted = grouped_mm_fp8.grouped_mm_fp8_weight_grad_reference(*operands, end, blockwise)[0]
    assert actual.dtype == torch.bfloat16 and (close(actual, wanted) if rows else not actual.any())
    [ends_of_parts] = launched
    assert ends_of_parts[-1] == end.item() and (len(ends_of_parts) > 1) == (multiprocessors > 1 and rows == 5000)
    assert all(a % 128 == 0 and a < b for a, b in zip(ends_of_parts, ends_of_parts[1:], strict=False))
    torch.library.opcheck(grouped_mm_fp8.mm_fp8_weight_grad, (*operands, rows, blockwise), test_utils=OPCHECKS[1:])


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_weight_grad_added_to_a_sum(rows) -> None:
    """Of gradients in E5M2, in fp32; or alone."""
    ends = offsets([rows])
    grad_NW, grad_scale, _ = of_weight_grad(torch.randn(rows, 144), ends, False)
    grad_NW, columns = grad_NW.float().to(torch.float8_e5m2), of_weight_grad(torch.randn(rows, 48), ends, False)[:2]
    before_NK = torch.randn(144, 48)
    blocks = max(-(-rows // 128), 1)
    grad, x = (
        (elements[:, : blocks * 128].double().unflatten(1, (blocks, 128)) * scale[:blocks, None]).flatten(1)
        for elements, scale in ((grad_NW, grad_scale), columns)
    )
    for adds in (False, True):
        out_NK, expected = before_NK.clone(), before_NK * adds + grad @ x.t()
        arguments = grad_NW, grad_scale, *columns, rows, adds
        torch.library.opcheck(grouped_mm_fp8.mm_fp8_weight_grad_, (out_NK.clone(), *arguments), test_utils=OPCHECKS[1:])
        grouped_mm_fp8.mm_fp8_weight_grad_(out_NK, *arguments)
        assert (out_NK - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("tiles", [1, 32, 128, 132, 176, 256, 1000, 80000])
def test_parts_of_a_sum(tiles) -> None:
    """Never longer than whole sums, and as many programs as there are have work if there is enough."""
    assert grouped_mm_fp8.parts_of_sum(tiles, 1, 132) == 1
    parts = grouped_mm_fp8.parts_of_sum(tiles, 128, 132)
    assert 1 <= parts <= 8 and (parts == 1) == (tiles in (128, 132, 256, 1000, 80000))
    assert tiles > 132 or tiles * parts > 132 * 0.75 or parts == 8


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to a rounding to bf16."""
    return ((actual - expected).norm() / expected.norm()).item() < 2**-8


def test_gluon_is_imported_for_its_kernels_alone() -> None:
    """It is an experimental part of Triton, without which all but the products on Hopper is to run."""
    code = "import sys; sys.modules['triton.experimental.gluon'] = None; import moe_titan.trainer, kernels.grouped_mm_fp8"
    subprocess.run([sys.executable, "-c", code], check=True)
