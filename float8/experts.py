"""The experts' grouped products in emulated low precision."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from float8 import emulation
from float8.recipes import Recipe
from kernels.expert_mlp import HIGH_PRECISION, Products


def emulated_products(recipe: Recipe, high_precision_weight_grad: bool = False) -> Products:
    """Grouped products that quantise every expert's rows and weight on their own, as an operand of that expert's product.

    Waits for the offsets on the host. Rows past the last offset are never read and come out as zeros.
    """
    weight_grad = HIGH_PRECISION.weight_grad if high_precision_weight_grad else partial(_weight_grad, recipe)
    return Products(partial(_output, recipe), partial(_input_grad, recipe), weight_grad)


def _output(recipe: Recipe, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    out_RN = x_RK.new_zeros(len(x_RK), w_ENK.shape[1])
    for expert, rows in _groups(offsets_E):
        out_RN[rows] = emulation.output(recipe, x_RK[rows], w_ENK[expert])
    return out_RN


def _input_grad(recipe: Recipe, grad_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    grad_RK = grad_RN.new_zeros(len(grad_RN), w_ENK.shape[2])
    for expert, rows in _groups(offsets_E):
        grad_RK[rows] = emulation.input_grad(recipe, grad_RN[rows], w_ENK[expert])
    return grad_RK


def _weight_grad(recipe: Recipe, grad_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
    grad_ENK = x_RK.new_zeros(len(offsets_E), grad_RN.shape[1], x_RK.shape[1])
    for expert, rows in _groups(offsets_E):
        grad_ENK[expert] = emulation.weight_grad(recipe, grad_RN[rows], x_RK[rows])
    return grad_ENK


def _groups(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and those rows."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
