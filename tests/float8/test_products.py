"""Emulated products and gradients against fp64 ones of operands rounded by definition, and against torchao's linear layer."""

from dataclasses import replace

import float8_reference
import pytest
import torch
from torch import Tensor

from float8 import emulation
from float8.emulation import EmulatedLinear
from float8.experts import EmulatedProducts
from float8.grouped_emulation import grouped_weight_grad
from float8.recipes import RECIPES, Recipe, rotate_rows
from kernels.expert_mlp import expert_mlp


@pytest.fixture(autouse=True)
def seed() -> None:
    """A tie that falls the other way in the last bit would be an error of a whole rounding step: the numbers are fixed."""
    torch.manual_seed(0)


def nearest(recipe: str) -> Recipe:
    """The recipe with all rounding to the nearest."""
    return replace(RECIPES[recipe], grad=replace(RECIPES[recipe].grad, stochastic=False))


class Linear(torch.autograd.Function):
    """``x @ w^T`` with every operand of the three products rounded by definition, in fp64."""

    @staticmethod
    def forward(ctx, x_RK: Tensor, w_NK: Tensor, recipe: str, quantize_weight_grad: bool = True) -> Tensor:
        ctx.save_for_backward(x_RK, w_NK)
        ctx.recipe, ctx.quantize_weight_grad = recipe, quantize_weight_grad
        return rounded(x_RK, 1, recipe, "input") @ rounded(w_NK, 1, recipe, "weight").t()

    @staticmethod
    def backward(ctx, grad_RN: Tensor) -> tuple:
        (x_RK, w_NK), recipe = ctx.saved_tensors, ctx.recipe
        grad_x = rounded(grad_RN, 1, recipe, "grad") @ rounded(w_NK, 0, recipe, "weight")
        if not ctx.quantize_weight_grad:
            return grad_x, grad_RN.t() @ x_RK, None, None
        if recipe == "nvfp4":
            grad_RN, x_RK = rotate_rows(grad_RN), rotate_rows(x_RK)
        if recipe == "rowwise" and len(x_RK):
            grad, x = (float8_reference.simulate_turned(y, recipe, name) for y, name in ((grad_RN, "grad"), (x_RK, "input")))
        else:
            grad, x = rounded(grad_RN, 0, recipe, "grad"), rounded(x_RK, 0, recipe, "input")
        return grad_x, grad.t() @ x, None, None


def rounded(x: Tensor, axis: int, recipe: str, operand: str) -> Tensor:
    return float8_reference.simulate(x.detach(), axis, recipe, operand) if len(x) else x


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe) -> None:
    weight = torch.randn(144, 136, dtype=torch.float64)
    layer = torch.nn.Linear(136, 144, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    parameter = layer.weight
    layer = EmulatedLinear(layer, nearest(recipe))
    assert layer.weight is parameter
    x, grad = torch.randn(2, 65, 136, dtype=torch.float64, requires_grad=True), torch.randn(2, 65, 144, dtype=torch.float64)
    y = layer(x)
    y.backward(grad)
    x_ref, w_ref = x.detach().flatten(0, 1).requires_grad_(), weight.requires_grad_()
    y_ref = Linear.apply(x_ref, w_ref, recipe)
    y_ref.backward(grad.flatten(0, 1))
    for actual, expected in ((y, y_ref), (x.grad, x_ref.grad), (layer.weight.grad, w_ref.grad)):
        assert error(actual.view_as(expected), expected) < 1e-7


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_equals_that_of_torchao(recipe) -> None:
    """But for the weight gradient of ``rowwise``, for which torchao quantises columns: that is as near to it as to bf16's."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    plain = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    theirs = Float8Linear.from_float(plain, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))
    results = []
    for layer in (theirs, EmulatedLinear(plain, RECIPES[recipe])):
        x = torch.linspace(-3, 5, 40 * 96).sin().view(40, 96).bfloat16().requires_grad_()
        y = layer(x)
        plain.weight.grad = None
        y.backward(y.detach().cos())
        results.append((y, x.grad, plain.weight.grad))
    for i, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert actual.dtype == torch.bfloat16
        # One rounding to bf16 apart at most.
        assert error(actual, expected) < (0.05 if recipe == "rowwise" and i == 2 else 2**-9)


def test_linear_has_its_gradients_in_a_compiled_block() -> None:
    layer = EmulatedLinear(torch.nn.Linear(32, 48, bias=False), RECIPES["nvfp4"])
    x = torch.randn(2, 20, 32, requires_grad=True)
    results = []

    def block(x: torch.Tensor) -> torch.Tensor:
        return layer(2 * x)

    for forward in (block, torch.compile(block, backend="aot_eager")):
        y = forward(x)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (x, layer.weight))))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_operands(recipe) -> None:
    """The error of a product of independent operands is the root of the sum of their squared errors, within 10 %."""
    x, weight, grad = torch.randn(512, 256), torch.randn(256, 256), torch.randn(512, 256)
    for product, operands, exact in (
        (emulation.output, (("input", x, 1), ("weight", weight, 1)), x @ weight.t()),
        (emulation.input_grad, (("grad", grad, 1), ("weight", weight, 0)), grad @ weight),
        (emulation.weight_grad, (("grad", grad, 0), ("input", x, 0)), grad.t() @ x),
    ):
        squares = [error(float8_reference.simulate(y, axis, recipe, operand), y) ** 2 for operand, y, axis in operands]
        stochastic = [recipe == "nvfp4" and operand == "grad" for operand, _, _ in operands]
        found = error(product(nearest(recipe), *(y for _, y, _ in operands)), exact)
        assert abs(found / sum(squares) ** 0.5 - 1) < 0.1
        if any(stochastic):
            found = error(product(RECIPES[recipe], *(y for _, y, _ in operands)), exact)
            # Rounding up or down by chance has twice the variance of rounding to the nearest.
            assert abs(found / (2 * squares[0] + squares[1]) ** 0.5 - 1) < 0.1


def test_errors_of_turned_rows_are_those_of_the_rows() -> None:
    """Also where those of one operand differ by a thousand, and those of the other the other way round."""
    size_R = 10.0 ** torch.randint(-2, 2, (512, 1))
    grad, x, ends = torch.randn(512, 96) * size_R, torch.randn(512, 64) / size_R, torch.tensor([200, 200, 512], dtype=torch.int32)
    recipe = RECIPES["rowwise"]
    squares = [error(recipe.input.simulate(y, 1), y) ** 2 for y in (grad, x)]
    for e, found in enumerate(grouped_weight_grad(recipe, grad, x, ends)):
        rows = slice([0, 200, 200][e], int(ends[e]))
        exact = grad[rows].double().t() @ x[rows].double()
        if e == 1:
            assert not found.any()
        else:
            assert abs(error(found, exact) / sum(squares) ** 0.5 - 1) < 0.1


SIZES = [1, 0, 7, 127, 129, 16]


def expert_inputs(D: int = 48, F: int = 32) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens, weights and routing weights in fp64, the last expert all zeros, with an outlier; and the indices of top-1 rows."""
    E, R = len(SIZES), sum(SIZES)
    x_ND = torch.randn(R, D, dtype=torch.float64)
    x_ND[20, 3] = 1e4
    w13, w2 = torch.randn(E, 2, F, D, dtype=torch.float64) / 8, torch.randn(E, D, F, dtype=torch.float64) / 8
    w13[-1], w2[-1] = 0, 0
    spare = 5
    row_N = torch.randperm(R)
    pair_R = torch.full((R + spare,), -1, dtype=torch.int32)
    pair_R[row_N] = torch.arange(R, dtype=torch.int32)
    offsets = torch.tensor(SIZES).cumsum(0).int()
    return [x_ND, w13, w2, torch.rand(R, dtype=torch.float32)], [pair_R, row_N[:, None].int(), offsets]


def expected_mlp(x_ND, w13, w2, weights_P, pair_R, offsets, recipe: str, quantize_weight_grad: bool) -> Tensor:
    outputs, start = [], 0
    for w13_2FD, w2_DF, end in zip(w13, w2, offsets.tolist(), strict=True):
        pairs = pair_R[start:end].long()
        gate_up = Linear.apply(x_ND[pairs], w13_2FD.flatten(0, 1), recipe, quantize_weight_grad)
        gate, up = gate_up.chunk(2, dim=1)
        act = torch.nn.functional.silu(gate) * up * weights_P[pairs, None].double()
        outputs.append(Linear.apply(act, w2_DF, recipe, quantize_weight_grad))
        start = end
    return torch.cat(outputs)


@pytest.mark.parametrize(("quantize_weight_grad", "recompute"), [(True, False), (False, True)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts(recipe, quantize_weight_grad, recompute) -> None:
    inputs, (pair_R, row_NK, offsets) = expert_inputs()
    products = EmulatedProducts(nearest(recipe), not quantize_weight_grad)
    actual_inputs = [x.clone().requires_grad_() for x in inputs]
    actual = expert_mlp(*actual_inputs, pair_R, row_NK, offsets, recompute, products)[: offsets[-1]]
    grad = torch.randn_like(actual)
    actual.backward(grad)
    inputs = [x.requires_grad_() for x in inputs]
    expected = expected_mlp(*inputs, pair_R, offsets, recipe, quantize_weight_grad)
    expected.backward(grad)
    assert error(actual, expected) < 1e-7
    for a, e in zip(actual_inputs, inputs, strict=True):
        assert error(a.grad, e.grad) < 1e-6
    assert not actual_inputs[1].grad[1].any()  # An expert without tokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_no_expert_do_not_leak(recipe) -> None:
    products, offsets = EmulatedProducts(RECIPES[recipe]), torch.tensor([7, 7, 23], dtype=torch.int32)
    rows, grad, w = torch.randn(30, 32), torch.randn(30, 48), torch.randn(3, 48, 32)
    results = []
    for filler in (0.0, 1e4, float("nan")):
        rows[23:], grad[23:] = filler, filler
        results.append((products.output(rows, w, offsets), products.input_grad(grad, w, offsets)))
        results[-1] += (products.weight_grad(grad, rows, offsets),)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert not results[0][0][23:].any() and not results[0][1][23:].any()


@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_token_for_any_expert(recipe, rows) -> None:
    products, offsets = EmulatedProducts(RECIPES[recipe]), torch.zeros(3, dtype=torch.int32)
    x, grad, w = torch.randn(rows, 32), torch.randn(rows, 48), torch.randn(3, 48, 32)
    assert torch.equal(products.output(x, w, offsets), torch.zeros(rows, 48))
    assert torch.equal(products.input_grad(grad, w, offsets), torch.zeros(rows, 32))
    assert torch.equal(products.weight_grad(grad, x, offsets), torch.zeros(3, 48, 32))


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
