"""Tokens in rows by plain, differentiable PyTorch."""

from torch import Tensor


def place_rows(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """``rows[row_TK[t, k]] = x[t]`` [num_rows, D], -1 for nowhere; zero where no token stands."""
    place_P = row_TK.where(row_TK >= 0, num_rows).flatten().long()
    copies_PD = x_TD.repeat_interleave(row_TK.shape[1], dim=0)
    return x_TD.new_zeros(num_rows + 1, x_TD.shape[1]).index_copy(0, place_P, copies_PD)[:num_rows]
