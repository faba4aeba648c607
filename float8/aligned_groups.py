"""Groups of rows that are moved apart, so that each begins at a multiple of a number of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class AlignedGroups:
    """Where the rows of groups go, with zeros between; iterates over the groups that are not empty.

    ``ends`` of the groups there, ``group_W`` [W] int64 of each row; row r of before goes to ``place_R[r]`` (None: all stay).
    """

    ends: list[int]
    group_W: Tensor
    place_R: Tensor | None

    @classmethod
    def of(cls, offsets_E: Tensor, unit: int, offsets: list[int] | None = None) -> "AlignedGroups":
        """Waits for the ends [E] of the groups, unless they are given on the host as well."""
        offsets = offsets_E.tolist() if offsets is None else offsets
        padded = [-(-(end - start) // unit) * unit for start, end in zip([0, *offsets], offsets, strict=False)]
        ends, device = list(accumulate(padded)), offsets_E.device
        group_W = torch.searchsorted(torch.tensor(ends, device=device), torch.arange(ends[-1], device=device), right=True)
        if ends == offsets:
            return cls(ends, group_W, None)
        rows_R = torch.arange(offsets[-1], device=device)
        shift_E = torch.tensor([0] + [end - offset for end, offset in zip(ends, offsets, strict=True)], device=device)
        return cls(ends, group_W, rows_R + shift_E[torch.searchsorted(offsets_E, rows_R, right=True, out_int32=True)])

    @property
    def sizes(self) -> list[int]:
        return [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def place(self, x_RK: Tensor) -> Tensor:
        """[W, K]; rows past the last group are left out."""
        if self.place_R is None:
            return x_RK[: self.ends[-1]]
        x_WK = x_RK.new_zeros(len(self.group_W), x_RK.shape[1])
        return x_WK.index_copy(0, self.place_R, x_RK[: len(self.place_R)])

    def take(self, x_WK: Tensor) -> Tensor:
        """The rows of the groups, as they were before."""
        return x_WK if self.place_R is None else x_WK[self.place_R]

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        for group, (start, end) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
            if end > start:
                yield group, slice(start, end)
