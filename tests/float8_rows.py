"""FP8 experts beside emulated ones, compared row by row: one row with an outlier would hide all others in a norm over a tensor.

The bounds: both compute alike up to the last bit of bf16 numbers, from sums in another order. Where that bit moves the maximum
of a row or block, its scale moves by 2^-8 and up to one element in ten rounds to its neighbour in E4M3, which is up to 2^-3 away.
Moving 10 % of the emulated products' bf16 results by one bit gives a mean error of rows of at most 1.2e-2, and up to 0.13 in a
column of a weight gradient that has but a few large elements, where kernels and emulation were found 0.15 apart.
The outlier does not reach the gates: silu of -88 changes by half with their last bit.
"""

import torch
from torch import Tensor

from kernels.expert_mlp import Products, expert_mlp

MEAN, LARGEST = 1.5e-2, 0.2
OUTLIER = 3  # The token that has one.


def inputs(D: int, F: int, groups: list[int], device: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Tokens of two choices, weights and routing weights; the indices of their rows; the gradient of the output.

    Five rows more than the groups have, whose gradient is NaN.
    """
    E, R = len(groups), sum(groups)
    N = R // 2 + 9

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    pair_R = torch.cat((torch.randperm(2 * N)[:R], torch.full((5,), -1))).int().to(device)
    row_P = torch.full((2 * N,), -1, dtype=torch.int32, device=device)
    row_P[pair_R[:R].long()] = torch.arange(R, dtype=torch.int32, device=device)
    values = [randn(N, D), randn(E, 2, F, D) / 16, randn(E, D, F) / 16, torch.rand(2 * N, device=device)]
    values[0][OUTLIER, 3], values[1][:, 0, :, 3], grad_RD = 1e4, 0, randn(R + 5, D)
    grad_RD[R:] = torch.nan
    offsets_E = torch.tensor(groups, device=device).cumsum(0, dtype=torch.int32)
    return values, [pair_R, row_P.view(N, 2), offsets_E], grad_RD


def run(products: Products, values: list[Tensor], index: list[Tensor], grad_RD: Tensor) -> list[Tensor]:
    """The output of rows with data, and the gradients of :func:`inputs`' values."""
    leaves = [value.clone().requires_grad_() for value in values]
    out_RD = expert_mlp(*leaves, *index, False, products)
    out_RD.backward(grad_RD)
    return [out_RD[: len(grad_RD) - 5].detach(), *(leaf.grad for leaf in leaves)]


def row_errors(actual: list[Tensor], expected: list[Tensor]) -> dict[str, Tensor]:
    """Relative errors of what :func:`run` returns: of rows; of columns of a weight's gradient, all of whose elements an outlier
    in a token reaches alike; of routing weights those of the token with an outlier, and of all others."""
    names = "out", "x", "w13", "w2", "weights"
    return {name: _errors(*pair) for name, *pair in zip(names, actual, expected, strict=True)}


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    actual, expected = actual.double(), expected.double()
    squares, scale = (_sums((actual - expected).square()), _sums(expected.square()))
    return (squares / torch.where(scale == 0, 1, scale)).sqrt()


def _sums(squares: Tensor) -> Tensor:
    if squares.dim() == 1:
        token_N = squares.view(-1, 2).sum(1)
        return torch.stack((token_N[OUTLIER], token_N.sum() - token_N[OUTLIER]))
    return squares.sum(1) if squares.dim() == 2 else squares.flatten(1, -2).sum(1).flatten()


def differing(actual: list[Tensor], expected: list[Tensor]) -> list[str]:
    """What is not the same up to roundings, with its mean and largest error; NaN differs."""
    found = {name: (errors.mean().item(), errors.max().item()) for name, errors in row_errors(actual, expected).items()}
    return [f"{name}: {mean:.1e}, {most:.1e}" for name, (mean, most) in found.items() if not (mean < MEAN and most < LARGEST)]
