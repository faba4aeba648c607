"""Tokens in rows by plain, differentiable PyTorch."""

import torch
from torch import Tensor


def place_rows(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """``rows[row_TK[t, k]] = x[t]`` [num_rows, D], -1 for nowhere; zero where no token stands."""
    place_P = row_TK.where(row_TK >= 0, num_rows).flatten().long()
    copies_PD = x_TD.repeat_interleave(row_TK.shape[1], dim=0)
    return x_TD.new_zeros(num_rows + 1, x_TD.shape[1]).index_copy(0, place_P, copies_PD)[:num_rows]


def some_choices(T: int, K: int, experts: int, nowhere: bool, generator: torch.Generator) -> Tensor:
    """Different experts of each token [T, K]; of every fourth token, or of all, none that exists."""
    experts_TK = torch.rand(T, experts, generator=generator).argsort(dim=1)[:, :K]
    experts_TK[:: 1 if nowhere else 4] = experts
    return experts_TK


def expert_weights(experts: int, D: int, F: int) -> tuple[Tensor, Tensor]:
    """w13 [experts, 2, F, D] and w2 [experts, D, F] in bf16, the same on every rank."""
    generator = torch.Generator().manual_seed(99)
    w13, w2 = (torch.randn(experts, *size, generator=generator).bfloat16() / 8 for size in ((2, F, D), (D, F)))
    return w13, w2
