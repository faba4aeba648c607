"""The kernels' ops as PyTorch sees them, and their gradients in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from rows import place_rows
from torch.autograd import gradcheck

from kernels.expert_mlp import expert_mlp, expert_mlp_reference
from kernels.grouped_mm import (
    _grouped_mm,
    _grouped_mm_weight_grad,
    grouped_mm,
    grouped_mm_reference,
    grouped_mm_weight_grad,
    grouped_mm_weight_grad_reference,
)
from kernels.permute import gather_sum, spread_rows, unpermute
from kernels.route import COUNTED_TOKENS, RouteOptions, block_counts_reference, route
from kernels.sort import _sort_pairs
from kernels.stash import stash_rows
from kernels.swiglu import weighted_swiglu, weighted_swiglu_backward, weighted_swiglu_reference

GROUPS = [[0, 1, 7, 63, 65], [3, 0, 0, 2], [0, 0, 0], [5], [0, 4]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def offsets(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


def places(T: int, K: int, R: int) -> torch.Tensor:
    """A random assignment of tokens to rows [T, K], with rows left empty and tokens of fewer than K rows (-1)."""
    row_TK = torch.full((T, K), -1, dtype=torch.int32)
    for pair, row in zip(torch.randperm(T * K).tolist(), torch.randperm(R)[: R - 2].tolist(), strict=False):
        row_TK.view(-1)[pair] = row
    return row_TK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ops_are_registered_correctly(dtype) -> None:
    x_TD, rows_RD, row_TK = torch.randn(4, 6, dtype=dtype), torch.randn(7, 6, dtype=dtype), places(4, 2, 7)
    torch.library.opcheck(spread_rows, (x_TD, row_TK, 7))
    torch.library.opcheck(gather_sum, (rows_RD, row_TK))
    torch.library.opcheck(_grouped_mm, (x_TD.detach(), torch.randn(2, 6, 5, dtype=dtype), offsets([1, 3])))
    torch.library.opcheck(_grouped_mm_weight_grad, (torch.randn(4, 5, dtype=dtype), x_TD.detach(), offsets([1, 3])))
    torch.library.opcheck(_sort_pairs, (torch.tensor([2, 0, 3, 2, 1]), 3, None, 0))
    gate_up_R2F, weights_P = torch.randn(5, 2, 3, dtype=dtype), torch.rand(8)
    index = (torch.tensor([6, 0, 3, 7, -1], dtype=torch.int32), torch.tensor([4]))
    torch.library.opcheck(weighted_swiglu, (gate_up_R2F.requires_grad_(), weights_P.requires_grad_(), *index))
    grad_RF = torch.randn(5, 3, dtype=dtype)
    for rows in ((gate_up_R2F.detach(), None), (torch.randn(9, 2, 3, dtype=dtype), torch.tensor([2]))):
        torch.library.opcheck(weighted_swiglu_backward, (grad_RF, rows[0], weights_P.detach(), *index, rows[1]))
    torch.library.opcheck(stash_rows, (grad_RF, torch.tensor([4]), torch.randn(9, 3, dtype=dtype), torch.tensor([2])))
    gate_ED, valid_T, chosen_TK = torch.randn(5, 6), torch.rand(4) < 0.7, torch.randint(0, 5, (4, 2))
    for optional in ((None, None, None, None), (torch.randn(5), torch.randn(5), valid_T, None), (None, None, None, chosen_TK)):
        arguments = (x_TD, gate_ED, *optional, 2, True, True, 1.5, 0, 0)
        torch.library.opcheck(torch.ops.moe_titan.route.default, arguments)


@pytest.mark.parametrize(("T", "K", "R"), [(5, 3, 11), (4, 2, 8), (1, 1, 4), (3, 2, 2)])
def test_unpermute_gradient(T, K, R) -> None:
    row_TK = places(T, K, R)
    rows_RD = torch.randn(R, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(unpermute, (rows_RD, row_TK))


def test_spread_rows_and_unpermute_are_adjoint() -> None:
    row_TK = places(6, 3, 20)
    x_TD, rows_RD = torch.randn(6, 5, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    assert torch.equal(spread_rows(x_TD, row_TK, 20), place_rows(x_TD, row_TK, 20))
    left = (spread_rows(x_TD, row_TK, 20) * rows_RD).sum()
    right = (x_TD * unpermute(rows_RD, row_TK)).sum()
    assert left.item() == pytest.approx(right.item(), rel=1e-12)


def test_bf16_rows_are_added_in_fp32() -> None:
    """1 + 2^-8 + 2^-8 in bf16 steps loses both small rows."""
    rows_RD = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert gather_sum(rows_RD, torch.tensor([[0, 1, 2]])).item() == 1 + 2.0**-7


def test_rows_without_index_do_not_leak() -> None:
    rows_RD = torch.full((3, 4), math.nan)
    rows_RD[0] = 2.0
    assert torch.equal(gather_sum(rows_RD, torch.tensor([[0, -1], [-1, -1]])), torch.tensor([[2.0] * 4, [0.0] * 4]))
    assert torch.equal(spread_rows(rows_RD, torch.tensor([[1], [-1], [-1]]), 2)[1], torch.tensor([2.0] * 4))


@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_weighted_swiglu_gradient(num_rows) -> None:
    gate_up_R2F = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weights_P, pair_R = torch.rand(9, dtype=torch.float64, requires_grad=True), torch.randperm(9)[:5]
    assert gradcheck(weighted_swiglu, (gate_up_R2F, weights_P, pair_R, torch.tensor([num_rows])))


def test_weighted_swiglu_backward_of_autograd() -> None:
    gate_up_R2F = torch.randn(6, 2, 5, requires_grad=True)
    weights_P, index = torch.rand(9, requires_grad=True), (torch.tensor([3, 8, 0, 5, -1, -1]), torch.tensor(4))
    grad_RF = torch.randn(6, 5)
    act_RF = weighted_swiglu_reference(gate_up_R2F, weights_P, *index)
    expected = (*torch.autograd.grad(act_RF, (gate_up_R2F, weights_P), grad_RF), act_RF)
    for actual, wanted in zip(weighted_swiglu_backward(grad_RF, gate_up_R2F, weights_P, *index), expected, strict=True):
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


def expert_inputs(groups: list[int], tail: int, D: int, width: int, dtype: torch.dtype):
    """Tokens of two choices each, a random part of which is routed to the groups; differentiable inputs and the indices."""
    rows, E = sum(groups), len(groups)
    N = rows // 2 + 3
    pair_R = torch.cat((torch.randperm(2 * N)[:rows], torch.full((tail,), -1))).int()
    row_NK = torch.full((2 * N,), -1, dtype=torch.int32)
    row_NK[pair_R[:rows].long()] = torch.arange(rows, dtype=torch.int32)
    x_ND, weights_P = torch.randn(N, D, dtype=dtype), torch.rand(2 * N, dtype=dtype)
    w13_E2FD, w2_EDF = torch.randn(E, 2, width, D, dtype=dtype), torch.randn(E, D, width, dtype=dtype)
    return [x_ND, w13_E2FD, w2_EDF, weights_P], (pair_R, row_NK.view(N, 2), offsets(groups))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("groups", [[0, 1, 3], [2, 0], [0, 0], [1]], ids=str)
def test_expert_mlp_gradcheck(groups, recompute) -> None:
    inputs, index = expert_inputs(groups, tail=0, D=3, width=2, dtype=torch.float64)
    assert gradcheck(expert_mlp, (*(x.requires_grad_() for x in inputs), *index, recompute))


def test_expert_mlp_keeps_no_pre_activations_when_it_recomputes_them() -> None:
    inputs, index = expert_inputs([3, 2], tail=0, D=3, width=64, dtype=torch.float64)
    for recompute, kept in ((False, True), (True, False)):
        shapes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, shapes=shapes: shapes.append(x.shape) or x, lambda x: x):
            expert_mlp(*(x.requires_grad_() for x in inputs), *index, recompute)
        assert (torch.Size([5, 2, 64]) in shapes) == kept


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_expert_mlp_equals_loop_beside_nan(groups, dtype, tolerance) -> None:
    """What the gradient holds in rows past the last offset reaches no result."""
    rows = sum(groups)
    inputs, (pair_R, row_NK, ends) = expert_inputs(groups, tail=5, D=13, width=9, dtype=dtype)
    grad_RD = torch.randn(rows + 5, 13, dtype=dtype)
    wide = [x.double().clone().requires_grad_() for x in inputs]
    expected = expert_mlp_reference(*wide, pair_R, ends)
    expected[:rows].backward(grad_RD[:rows].double())
    grad_RD[rows:] = math.nan
    actual_inputs = [x.requires_grad_() for x in inputs]
    actual = expert_mlp(*actual_inputs, pair_R, row_NK, ends)
    actual.backward(grad_RD)
    assert relative_error(actual[:rows], expected[:rows]) < tolerance
    (x_ND, w13, w2, weights_P), (wide_x, wide_w13, wide_w2, wide_weights) = actual_inputs, wide
    assert relative_error(x_ND.grad, wide_x.grad) < tolerance
    assert relative_error(weights_P.grad, wide_weights.grad) < tolerance
    for weight, wide_weight in ((w13, wide_w13), (w2, wide_w2)):
        for expert, size in enumerate(groups):
            assert relative_error(weight.grad[expert], wide_weight.grad[expert]) < tolerance
            assert size or not weight.grad[expert].any()


def test_expert_mlp_without_rows() -> None:
    """No token reached this rank, and nothing was allocated for any."""
    w13, w2 = (torch.randn(shape, requires_grad=True) for shape in ((2, 2, 3, 4), (2, 4, 3)))
    x_ND, weights_P = torch.randn(0, 4, requires_grad=True), torch.rand(0, requires_grad=True)
    index = torch.empty(0, dtype=torch.int32)
    out = expert_mlp(x_ND, w13, w2, weights_P, index, index.view(0, 1), offsets([0, 0]))
    out.sum().backward()
    assert out.shape == (0, 4) and not w13.grad.any() and not w2.grad.any()


OPTIONS = [RouteOptions(3, True, True, 1.5), RouteOptions(2, False, True, 2.5, 3, 2), RouteOptions(2, True, False, 1.0)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["bare", "with biases and padding"])
def test_route_gradient(options, given) -> None:
    T, D, E = 5, 4, 6
    x_TD, gate_ED = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (T, E))
    gate_bias_E = torch.randn(E, dtype=torch.float64, requires_grad=True) if given else None
    fixed = {"bias_E": torch.randn(E), "valid_T": torch.tensor([True, False, True, True, False])} if given else {}

    def weights_and_scores(x_TD, gate_ED, gate_bias_E):
        return route(x_TD, gate_ED, options, gate_bias_E=gate_bias_E, **fixed)[1:3]

    assert gradcheck(weights_and_scores, (x_TD, gate_ED, gate_bias_E))


def test_chosen_experts_are_taken() -> None:
    x_TD, gate_ED, chosen_TK = torch.randn(5, 4), torch.randn(6, 4), torch.tensor([[4, 1], [0, 5], [6, 6], [2, 3], [3, 2]])
    experts_TK, weights_TK, scores_TE, _ = route(x_TD, gate_ED, OPTIONS[2], chosen_TK=chosen_TK)
    assert torch.equal(experts_TK, chosen_TK) and not weights_TK[2].any()
    assert torch.equal(weights_TK[[0, 1, 3, 4]], scores_TE.gather(1, chosen_TK.clamp(max=5))[[0, 1, 3, 4]])


def test_block_counts() -> None:
    experts_TK = torch.randint(0, 5, (2 * COUNTED_TOKENS + 3, 2))
    counts = block_counts_reference(experts_TK, 4)
    for block, part_TK in enumerate(experts_TK.split(COUNTED_TOKENS)):
        assert counts[block].tolist() == torch.bincount(part_TK.flatten(), minlength=5)[:4].tolist()


def test_route_computes_in_fp32() -> None:
    options = RouteOptions(2, True, False, 1.0)
    x_TD, gate_ED = torch.randn(50, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    _, _, scores_TE, _ = route(x_TD, gate_ED, options)
    grad_TE = torch.randn(50, 8)
    scores_TE.backward(grad_TE)
    wide = [x.detach().double().requires_grad_() for x in (x_TD, gate_ED)]
    expected_TE = (wide[0] @ wide[1].t()).softmax(1)
    expected_TE.backward(grad_TE.double())
    assert scores_TE.dtype == gate_ED.grad.dtype == torch.float32 and x_TD.grad.dtype == torch.bfloat16
    assert relative_error(scores_TE, expected_TE) < 1e-6
    assert relative_error(gate_ED.grad, wide[1].grad) < 1e-6
    assert relative_error(x_TD.grad, wide[0].grad) < 2e-3
