"""Emulated grouped products: every group of rows, and its weight, is an operand of its own.

All groups are rounded at once, since launches for each of many experts would take most of the time; only the products are a loop.
The host waits for the ends of the groups. Rows past the last group are never read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from float8.recipes import Groups, Quantizer, Recipe, rotate_rows


def grouped_output(recipe: Recipe, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``x @ w[e]^T`` [R, N] in x's dtype; zeros past the last group."""
    return _rows(recipe.input, x_RK, _weights(recipe.weight, w_ENK, 1).transpose(1, 2), offsets_E)


def grouped_input_grad(recipe: Recipe, grad_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``grad @ w[e]`` [R, K] in grad's dtype; zeros past the last group."""
    return _rows(recipe.grad, grad_RN, _weights(recipe.weight, w_ENK, 0), offsets_E)


def grouped_weight_grad(recipe: Recipe, grad_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
    """``grad^T @ x`` over the rows of each group [E, N, K] in x's dtype; zeros for an empty group."""
    layout = _Layout.of(offsets_E, recipe.input.rows_of_block(0) or 1)
    grad_WN, x_WK = layout.place(grad_RN), layout.place(x_RK)
    if recipe.hadamard:
        grad_WN, x_WK = rotate_rows(grad_WN), rotate_rows(x_WK)
    grad_WN, x_WK = recipe.grad.simulate(grad_WN, 0, layout.groups), recipe.input.simulate(x_WK, 0, layout.groups)
    grad_ENK = x_WK.new_zeros(len(offsets_E), grad_WN.shape[1], x_WK.shape[1])
    for expert, rows in layout:
        torch.mm(grad_WN[rows].t(), x_WK[rows], out=grad_ENK[expert])
    return grad_ENK.to(x_RK.dtype)


def _rows(quantizer: Quantizer, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    layout = _Layout.of(offsets_E, quantizer.rows_of_block(1) or 1)
    simulated_WK = quantizer.simulate(layout.place(x_RK), 1, layout.groups)
    out_RN = w_EKN.new_zeros(len(x_RK), w_EKN.shape[2])
    for expert, rows in layout:
        torch.mm(simulated_WK[rows], w_EKN[expert], out=out_RN[rows])
    return out_RN.to(x_RK.dtype)


def _weights(quantizer: Quantizer, w_ENK: Tensor, axis: int) -> Tensor:
    """Simulated weights [E, N, K] for products that sum over the given dimension of each."""
    E, N, _ = w_ENK.shape
    ends_E = torch.arange(N, (E + 1) * N, N, dtype=torch.int32)
    layout = _Layout.of(ends_E.to(w_ENK.device), quantizer.rows_of_block(axis) or 1, ends_E.tolist())
    return quantizer.simulate(layout.place(w_ENK.flatten(0, 1)), axis, layout.groups).unflatten(0, (E, -1))[:, :N]


@dataclass(frozen=True)
class _Layout:
    """Groups of rows that are moved apart by zeros, so that each begins with a block; iterates over those that are not empty.

    ``ends`` of the groups after that, of which row r goes to ``place_R[r]`` (None: stays).
    """

    ends: list[int]
    groups: Groups
    place_R: Tensor | None

    @classmethod
    def of(cls, offsets_E: Tensor, unit: int, offsets: list[int] | None = None) -> "_Layout":
        """``offsets``: the same on the host, where they are known there."""
        offsets = offsets_E.tolist() if offsets is None else offsets
        padded = [-(-(end - start) // unit) * unit for start, end in zip([0, *offsets], offsets, strict=False)]
        ends, device = list(accumulate(padded)), offsets_E.device
        ends_E = torch.tensor(ends, device=device)
        groups = Groups(torch.searchsorted(ends_E, torch.arange(ends[-1], device=device), right=True), len(ends))
        if ends == offsets:
            return cls(ends, groups, None)
        rows_R = torch.arange(offsets[-1], device=device)
        shift_E = torch.tensor([0] + [end - offset for end, offset in zip(ends, offsets, strict=True)], device=device)
        return cls(ends, groups, rows_R + shift_E[torch.searchsorted(offsets_E, rows_R, right=True, out_int32=True)])

    def place(self, x_RK: Tensor) -> Tensor:
        if self.place_R is None:
            return x_RK[: self.ends[-1]]
        x_WK = x_RK.new_zeros(len(self.groups.index_M), x_RK.shape[1])
        return x_WK.index_copy(0, self.place_R, x_RK[: len(self.place_R)])

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        for expert, (start, end) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
            if end > start:
                yield expert, slice(start, end)
