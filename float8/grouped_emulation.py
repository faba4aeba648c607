"""Emulated grouped products: every group of rows, and its weight, is an operand of its own.

All groups are rounded at once, since launches for each of many experts would take most of the time; only the products are a loop.
The host waits for the ends of the groups. Rows past the last group are never read.
"""

import torch
from torch import Tensor

from float8.aligned_groups import AlignedGroups
from float8.recipes import TURNED_ROWS, Groups, Quantizer, Recipe, rotate_rows, turned_rows


def grouped_output(recipe: Recipe, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``x @ w[e]^T`` [R, N] in w's dtype; zeros past the last group."""
    return _rows(recipe.input, x_RK, _weights(recipe.weight, w_ENK, 1).transpose(1, 2), offsets_E).to(w_ENK.dtype)


def grouped_input_grad(recipe: Recipe, grad_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``grad @ w[e]`` [R, K] in grad's dtype; zeros past the last group."""
    return _rows(recipe.grad, grad_RN, _weights(recipe.weight, w_ENK, 0), offsets_E).to(grad_RN.dtype)


def grouped_weight_grad(recipe: Recipe, grad_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
    """``grad^T @ x`` over the rows of each group [E, N, K] in grad's dtype; zeros for an empty group."""
    layout = AlignedGroups.of(offsets_E, TURNED_ROWS if recipe.turns_rows else recipe.input.rows_of_block(0) or 1)
    grad_WN, x_WK = layout.place(grad_RN), layout.place(x_RK)
    if recipe.hadamard:
        grad_WN, x_WK = rotate_rows(grad_WN), rotate_rows(x_WK)
    if not recipe.turns_rows:
        grad_WN, x_WK = recipe.grad.simulate(grad_WN, 0, _groups(layout)), recipe.input.simulate(x_WK, 0, _groups(layout))
    elif len(x_WK):
        grad_WN, x_WK = turned_rows(recipe.grad, grad_WN), turned_rows(recipe.input, x_WK)
    grad_ENK = x_WK.new_zeros(len(offsets_E), grad_WN.shape[1], x_WK.shape[1])
    for expert, rows in layout:
        torch.mm(grad_WN[rows].t(), x_WK[rows], out=grad_ENK[expert])
    return grad_ENK.to(grad_RN.dtype)


def _rows(quantizer: Quantizer, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    layout = AlignedGroups.of(offsets_E, quantizer.rows_of_block(1) or 1)
    simulated_WK = quantizer.simulate(layout.place(x_RK), 1, _groups(layout))
    out_RN = w_EKN.new_zeros(len(x_RK), w_EKN.shape[2])
    for expert, rows in layout:
        torch.mm(simulated_WK[rows], w_EKN[expert], out=out_RN[rows])
    return out_RN


def _weights(quantizer: Quantizer, w_ENK: Tensor, axis: int) -> Tensor:
    """Simulated weights [E, N, K] for products that sum over the given dimension of each."""
    E, N, _ = w_ENK.shape
    layout = AlignedGroups.equal(E, N, quantizer.rows_of_block(axis) or 1, w_ENK.device)
    return quantizer.simulate(layout.place(w_ENK.flatten(0, 1)), axis, _groups(layout)).unflatten(0, (E, -1))[:, :N]


def _groups(layout: AlignedGroups) -> Groups:
    return Groups(layout.group_W, len(layout.ends))
