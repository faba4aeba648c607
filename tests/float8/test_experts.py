"""The experts' FP8 products beside the emulated ones, in bf16; on the CPU the references of their kernels compute them."""

from collections.abc import Callable

import float8_rows
import pytest
import torch
from torch import Tensor

from float8.experts import EmulatedProducts, Float8Products
from float8.recipes import RECIPES
from kernels.expert_mlp import Kept, Products, expert_mlp
from kernels.quantize import quantize_columns, quantize_rows_reference, quantize_tiles_reference

SIZES = [1, 0, 7, 127, 129, 16]
SPARE = 5
RECIPE = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def products(recipe: str, *settings: bool) -> tuple[Float8Products, EmulatedProducts]:
    return Float8Products(recipe == "blockwise", *settings or (False,)), EmulatedProducts(RECIPES[recipe], *settings)


def numbers(*shape: int) -> Tensor:
    """Rows of all sizes, one of zeros, one with a huge outlier."""
    x = torch.randn(shape) * 10.0 ** torch.randint(-6, 6, (shape[0], *[1] * (len(shape) - 1)))
    x[0], x[-1].view(-1)[3] = 0, 1e30
    return x.bfloat16()


@RECIPE
def test_operands_are_those_of_the_recipe(recipe) -> None:
    """Bit for bit."""
    blockwise, quantizers = recipe == "blockwise", RECIPES[recipe]
    x_RK = numbers(130, 384)
    expected = quantizers.input.quantize(x_RK, 1)
    elements, scale = quantize_rows_reference(x_RK, blockwise)
    assert same(elements, expected.elements) and torch.equal(scale.view(-1, 130).t(), expected.scale)
    expected = quantizers.grad.quantize(x_RK, 0)
    elements, scale, ends = quantize_columns(x_RK, torch.tensor([130], dtype=torch.int32), blockwise)
    used = 2 if blockwise else 1
    assert ends.tolist() == [256] and same(elements[:, :130], expected.elements.t())
    assert torch.equal(scale[:used], expected.scale) and not elements[:, 130:256].float().any()
    if blockwise:
        w_NK = numbers(256, 384)
        expected = quantizers.weight.quantize(w_NK, 1)
        elements, scale = quantize_tiles_reference(w_NK[None], False)
        assert same(elements[0], expected.elements) and torch.equal(scale[0], expected.scale)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float(), b.float())


def inputs(D: int, F: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of two choices with an outlier, weights of which the last expert's are zero; and the indices of their rows."""
    E, R = len(SIZES), sum(SIZES)
    N = R // 2 + 3
    x_ND = torch.randn(N, D)
    x_ND[5, 3] = 1e4
    w13, w2 = torch.randn(E, 2, F, D) / 8, torch.randn(E, D, F) / 8
    w13[-1], w2[-1] = 0, 0
    pair_R = torch.cat((torch.randperm(2 * N)[:R], torch.full((SPARE,), -1))).int()
    row_NK = torch.full((2 * N,), -1, dtype=torch.int32)
    row_NK[pair_R[:R].long()] = torch.arange(R, dtype=torch.int32)
    values = [x_ND.bfloat16(), w13.bfloat16(), w2.bfloat16(), torch.rand(2 * N)]
    return values, [pair_R, row_NK.view(N, 2), torch.tensor(SIZES).cumsum(0).int()]


def passes(kind: Products, values: list[Tensor], index: list[Tensor], grad_RD: Tensor, recompute: bool) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.clone().requires_grad_() for x in values]
    out_RD = expert_mlp(*leaves, *index, recompute, kind)
    out_RD.backward(grad_RD)
    return [out_RD[: sum(SIZES)], *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("wide_grad", "packs_kept", "recompute"), [(False, False, True), (True, False, False), (False, True, False)]
)
@RECIPE
def test_experts_equal_emulated_ones(recipe, wide_grad, packs_kept, recompute) -> None:
    values, index = inputs(256, 128)
    grad_RD = torch.randn(sum(SIZES) + SPARE, 256).bfloat16()
    grad_RD[sum(SIZES) :] = 1e4
    results = [passes(kind, values, index, grad_RD, recompute) for kind in products(recipe, wide_grad, packs_kept)]
    for actual, expected in zip(*results, strict=True):
        # Sums in another order round to bf16 otherwise, and that, rarely, to E4M3.
        assert error(actual, expected) < 2e-3
    assert not results[0][2][1].any() and not results[0][3][1].any()  # An expert without tokens


@RECIPE
def test_saved_in_fp8(recipe) -> None:
    """Backward starts from what E4M3 keeps of the pre-activations: half the bytes, and its rounding in every gradient."""
    values, index = inputs(256, 128)
    values[0][5, 3] = 1  # no outlier, beside which a row's other elements would be lost
    grad_RD = torch.randn(sum(SIZES) + SPARE, 256).bfloat16()
    kinds = [products(recipe, False, packs_kept)[0] for packs_kept in (False, True)]
    (out, *grads), (packed_out, *packed_grads) = (passes(kind, values, index, grad_RD, False) for kind in kinds)
    assert torch.equal(out, packed_out)
    for actual, expected in zip(packed_grads, grads, strict=True):
        assert 1e-2 < error(actual, expected) < 6e-2
    gate_up = torch.randn(8, 2, 128).bfloat16()
    kept = [kind.keep(gate_up, torch.tensor([8])) for kind in kinds]
    assert kept[0].nbytes == gate_up.nbytes and kept[1].nbytes == 8 * (256 + 64)


@pytest.mark.parametrize("packs_kept", [False, True])
@RECIPE
def test_kept_among_others(recipe, packs_kept) -> None:
    """Pre-activations that a stash keeps from some row on give the gradients that their own would."""
    values, index = inputs(256, 128)
    grad_RD = torch.randn(sum(SIZES) + SPARE, 256).bfloat16()
    [kind, _] = products(recipe, False, packs_kept)

    def stash(kept: Tensor, num_rows: Tensor) -> Kept:
        return Kept(torch.cat((torch.full_like(kept[:3], 7), kept)), torch.tensor([3]))

    results = []
    for way in (None, stash):
        leaves = [x.clone().requires_grad_() for x in values]
        expert_mlp(*leaves, *index, products=kind, stash=way).backward(grad_RD)
        results.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *results))


@RECIPE
def test_nothing_is_packed_without_gradients(recipe, monkeypatch) -> None:
    """As in evaluation, which has no backward."""
    values, index = inputs(256, 128)
    [kind, _] = products(recipe, False, True)
    leaves = [x.requires_grad_() for x in values]
    expected = expert_mlp(*leaves, *index, products=kind)
    monkeypatch.setattr(kind, "keep", None)
    monkeypatch.setattr(kind, "spread", None)
    with torch.no_grad():
        assert torch.equal(expert_mlp(*leaves, *index, products=kind)[: sum(SIZES)], expected[: sum(SIZES)])


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@RECIPE
def test_rows_of_no_expert_do_not_leak(recipe) -> None:
    kind, offsets = products(recipe)[0], torch.tensor([7, 7, 23], dtype=torch.int32)
    rows, grad, w = torch.randn(30, 128).bfloat16(), torch.randn(30, 256).bfloat16(), torch.randn(3, 256, 128).bfloat16()
    results = []
    for filler in (0.0, 1e4, float("nan")):
        rows[23:], grad[23:] = filler, filler
        computed = kind.output(rows, w, offsets)[:23], kind.input_grad(grad, w, offsets)[:23]
        results.append((*computed, kind.weight_grad(grad, rows, offsets)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@RECIPE
def test_nothing_to_compute(recipe) -> None:
    """No token reached this rank, and nothing was allocated for any."""
    w13, w2 = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((2, 2, 128, 256), (2, 256, 128)))
    x_ND, weights_P = torch.randn(0, 256).bfloat16().requires_grad_(), torch.rand(0, requires_grad=True)
    index = torch.empty(0, dtype=torch.int32)
    out = expert_mlp(x_ND, w13, w2, weights_P, index, index.view(0, 1), torch.zeros(2).int(), False, products(recipe)[0])
    out.sum().backward()
    assert out.shape == (0, 256) and not w13.grad.any() and not w2.grad.any()


def move_bits(x: Tensor, share: float) -> Tensor:
    """Moves that share of bf16 numbers to a neighbour."""
    step = torch.randint(0, 2, x.shape).mul(2).sub(1) * (torch.rand(x.shape) < share)
    return torch.where(x == 0, x, (x.contiguous().view(torch.int16) + step.short()).view(torch.bfloat16))


class Disturbed(EmulatedProducts):
    """Products whose results change in their last bit in one element of ten."""

    def output(self, *operands: Tensor) -> Tensor:
        return move_bits(super().output(*operands), 0.1)

    def input_grad(self, *operands: Tensor) -> Tensor:
        return move_bits(super().input_grad(*operands), 0.1)

    def weight_grad(self, *operands: Tensor) -> Tensor:
        return move_bits(super().weight_grad(*operands), 0.1)


class Wrong(Float8Products):
    """Products one of whose operands is what ``mistake`` makes of it."""

    def __init__(self, recipe: str, method: str, mistake: Callable) -> None:
        super().__init__(recipe == "blockwise", False)
        original = getattr(self, method)
        setattr(self, method, lambda *arguments: mistake(original(*arguments)))


def next_block(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0].view(torch.uint8).roll(128, 1).view(operand[0].dtype), operand[1]


def swapped_scales(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0], operand[1].roll(1, 0)


def wrong_row(result: Tensor) -> Tensor:
    return result.index_copy(0, torch.tensor([200]), result[201:202])


def wrong_scale_of_a_row(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    scale = operand[1].clone()
    scale[..., 200] *= 2
    return operand[0], scale


def wrong_column(result: Tensor) -> Tensor:
    result[4, ..., 7] *= 1.25
    return result


MISTAKES = [
    ("spread", lambda result: (next_block(result[0]), result[1])),
    ("spread", lambda result: (wrong_scale_of_a_row(result[0]), result[1])),
    ("swiglu", swapped_scales),
    ("swiglu", wrong_scale_of_a_row),
    ("output", wrong_row),
    ("input_grad", wrong_row),
    ("weight_grad", wrong_column),
]


@RECIPE
def test_comparison_by_rows_tells_mistakes_from_roundings(recipe) -> None:
    """What tests on a GPU compare with."""
    arguments = float8_rows.inputs(512, 384, [1, 0, 7, 127, 129, 60], "cpu")
    emulated = EmulatedProducts(RECIPES[recipe])
    expected = float8_rows.run(emulated, *arguments)
    assert not float8_rows.differing(float8_rows.run(Float8Products(recipe == "blockwise", False), *arguments), expected)
    assert not float8_rows.differing(float8_rows.run(Disturbed(RECIPES[recipe]), *arguments), expected)
    for method, mistake in MISTAKES:
        assert float8_rows.differing(float8_rows.run(Wrong(recipe, method, mistake), *arguments), expected), (method, mistake)
