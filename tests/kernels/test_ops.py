"""The kernels' ops as PyTorch sees them, and their gradients in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from kernels.expert_mlp import expert_mlp, expert_mlp_reference
from kernels.gate import gate_logits
from kernels.grouped_mm import (
    grouped_mm,
    grouped_mm_reference,
    grouped_mm_weight_grad,
    grouped_mm_weight_grad_reference,
)
from kernels.permute import gather_rows, gather_sum, permute, unpermute
from kernels.sort import sort_pairs
from kernels.swiglu import weighted_swiglu, weighted_swiglu_backward, weighted_swiglu_reference

GROUPS = [[0, 1, 7, 63, 65], [3, 0, 0, 2], [0, 0, 0], [5], [0, 4]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def offsets(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


def indices(T: int, K: int, R: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random assignment of tokens to rows and its inverse, with empty rows and tokens of fewer than K rows."""
    row_TK = torch.full((T, K), -1)
    token_R = torch.full((R,), -1)
    for pair, row in zip(torch.randperm(T * K).tolist(), torch.randperm(R)[: R - 2].tolist(), strict=False):
        row_TK.view(-1)[pair], token_R[row] = row, pair // K
    return token_R, row_TK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ops_are_registered_correctly(dtype) -> None:
    x_TD, rows_RD = torch.randn(4, 6, dtype=dtype), torch.randn(7, 6, dtype=dtype)
    token_R, row_TK = indices(4, 2, 7)
    torch.library.opcheck(gather_rows, (x_TD, token_R))
    torch.library.opcheck(gather_sum, (rows_RD, row_TK))
    torch.library.opcheck(sort_pairs, (torch.tensor([2, 0, 3, 2, 1]), 3))
    gate_up_R2F, weights_R, num_rows = torch.randn(5, 2, 3, dtype=dtype), torch.rand(5), torch.tensor([4])
    torch.library.opcheck(weighted_swiglu, (gate_up_R2F.requires_grad_(), weights_R.requires_grad_(), num_rows))
    grad_RF = torch.randn(5, 3, dtype=dtype)
    torch.library.opcheck(weighted_swiglu_backward, (grad_RF, gate_up_R2F.detach(), weights_R.detach(), num_rows))


@pytest.mark.parametrize(("T", "K", "R"), [(5, 3, 11), (4, 2, 8), (1, 1, 4), (3, 2, 2)])
def test_permute_and_unpermute_gradients(T, K, R) -> None:
    token_R, row_TK = indices(T, K, R)
    x_TD = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    rows_RD = torch.randn(R, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(permute, (x_TD, token_R, row_TK))
    assert gradcheck(unpermute, (rows_RD, token_R, row_TK))


def test_permute_and_unpermute_are_adjoint() -> None:
    token_R, row_TK = indices(6, 3, 20)
    x_TD, rows_RD = torch.randn(6, 5, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    left = (permute(x_TD, token_R, row_TK) * rows_RD).sum()
    right = (x_TD * unpermute(rows_RD, token_R, row_TK)).sum()
    assert left.item() == pytest.approx(right.item(), rel=1e-12)


def test_bf16_rows_are_added_in_fp32() -> None:
    """1 + 2^-8 + 2^-8 in bf16 steps loses both small rows."""
    rows_RD = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert gather_sum(rows_RD, torch.tensor([[0, 1, 2]])).item() == 1 + 2.0**-7


def test_rows_without_index_do_not_leak() -> None:
    rows_RD = torch.full((3, 4), math.nan)
    rows_RD[0] = 2.0
    assert torch.equal(gather_sum(rows_RD, torch.tensor([[0, -1], [-1, -1]])), torch.tensor([[2.0] * 4, [0.0] * 4]))
    assert torch.equal(gather_rows(rows_RD, torch.tensor([-1, 0])), torch.tensor([[0.0] * 4, [2.0] * 4]))


@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_weighted_swiglu_gradient(num_rows) -> None:
    gate_up_R2F = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weights_R = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(weighted_swiglu, (gate_up_R2F, weights_R, torch.tensor([num_rows])))


def test_weighted_swiglu_backward_of_autograd() -> None:
    gate_up_R2F = torch.randn(6, 2, 5, requires_grad=True)
    weights_R, num_rows, grad_RF = torch.rand(6, requires_grad=True), torch.tensor(4), torch.randn(6, 5)
    act_RF = weighted_swiglu_reference(gate_up_R2F, weights_R, num_rows)
    expected = (*torch.autograd.grad(act_RF, (gate_up_R2F, weights_R), grad_RF), act_RF)
    for actual, wanted in zip(weighted_swiglu_backward(grad_RF, gate_up_R2F, weights_R, num_rows), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_grouped_products(groups) -> None:
    rows, E = sum(groups), len(groups)
    a_RK, b_EKN, grad_RN = torch.randn(rows + 3, 16), torch.randn(E, 16, 24), torch.randn(rows + 3, 24)
    ends = offsets(groups)
    expert_R = torch.repeat_interleave(torch.arange(E), torch.tensor(groups))
    each = torch.einsum("rk,rkn->rn", a_RK[:rows], b_EKN[expert_R])
    assert relative_error(grouped_mm_reference(a_RK, b_EKN, ends)[:rows], each) < 1e-6
    assert torch.equal(grouped_mm(a_RK, b_EKN, ends), grouped_mm_reference(a_RK, b_EKN, ends))
    assert relative_error(F.grouped_mm(a_RK[:rows], b_EKN, offs=ends), each) < 1e-6
    weight_ENK = torch.zeros(E, 24, 16).index_add(0, expert_R, grad_RN[:rows, :, None] * a_RK[:rows, None, :])
    assert relative_error(grouped_mm_weight_grad_reference(grad_RN, a_RK, ends), weight_ENK) < 1e-6
    assert relative_error(grouped_mm_weight_grad(grad_RN, a_RK, ends), weight_ENK) < 1e-6
    assert relative_error(F.grouped_mm(grad_RN[:rows].t(), a_RK[:rows], offs=ends), weight_ENK) < 1e-6


def expert_inputs(groups: list[int], tail: int, D: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, E = sum(groups), len(groups)
    rows_RD, weights_R = torch.randn(rows + tail, D, dtype=dtype), torch.rand(rows + tail, dtype=dtype)
    w13_E2FD, w2_EDF = torch.randn(E, 2, width, D, dtype=dtype), torch.randn(E, D, width, dtype=dtype)
    return [rows_RD, w13_E2FD, w2_EDF, weights_R]


@pytest.mark.parametrize("groups", [[0, 1, 3], [2, 0], [0, 0], [1]], ids=str)
def test_expert_mlp_gradcheck(groups) -> None:
    inputs = [x.requires_grad_() for x in expert_inputs(groups, tail=0, D=3, width=2, dtype=torch.float64)]
    assert gradcheck(expert_mlp, (*inputs, offsets(groups)))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_expert_mlp_equals_loop_beside_nan(groups, dtype, tolerance) -> None:
    """What the rows past the last offset hold, in the inputs and in the gradient, reaches no result."""
    rows, ends = sum(groups), offsets(groups)
    inputs = expert_inputs(groups, tail=5, D=13, width=9, dtype=dtype)
    grad_RD = torch.randn_like(inputs[0])
    wide = [x.double().clone().requires_grad_() for x in inputs]
    expected = expert_mlp_reference(*wide, ends)
    expected.backward(grad_RD.double())
    for tensor in (inputs[0], inputs[3], grad_RD):
        tensor[rows:] = math.nan
    actual_inputs = [x.requires_grad_() for x in inputs]
    actual = expert_mlp(*actual_inputs, ends)
    actual.backward(grad_RD)
    assert relative_error(actual[:rows], expected[:rows]) < tolerance
    (rows_RD, w13, w2, weights_R), (wide_rows, wide_w13, wide_w2, wide_weights) = actual_inputs, wide
    assert relative_error(rows_RD.grad[:rows], wide_rows.grad[:rows]) < tolerance
    assert relative_error(weights_R.grad[:rows], wide_weights.grad[:rows]) < tolerance
    for weight, wide_weight in ((w13, wide_w13), (w2, wide_w2)):
        for expert, size in enumerate(groups):
            assert relative_error(weight.grad[expert], wide_weight.grad[expert]) < tolerance
            assert size or not weight.grad[expert].any()


def test_expert_mlp_without_rows() -> None:
    """No token reached this rank, and nothing was allocated for any."""
    rows_RD, w13, w2, weights_R = (x.requires_grad_() for x in expert_inputs([0, 0], 0, 4, 3, torch.float32))
    out = expert_mlp(rows_RD, w13, w2, weights_R, offsets([0, 0]))
    out.sum().backward()
    assert out.shape == (0, 4) and not w13.grad.any() and not w2.grad.any()


def test_gate_logits() -> None:
    x_TD = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight_ED = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(gate_logits, (x_TD, weight_ED))


def test_gate_logits_compute_in_fp32() -> None:
    x_TD, weight_ED = torch.randn(50, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    logits_TE, grad_TE = gate_logits(x_TD, weight_ED), torch.randn(50, 8)
    logits_TE.backward(grad_TE)
    assert logits_TE.dtype == weight_ED.grad.dtype == torch.float32 and x_TD.grad.dtype == torch.bfloat16
    assert relative_error(logits_TE, x_TD.double() @ weight_ED.double().t()) < 1e-6
    assert relative_error(weight_ED.grad, grad_TE.double().t() @ x_TD.double()) < 1e-6
    assert relative_error(x_TD.grad, grad_TE.double() @ weight_ED.double()) < 2e-3
