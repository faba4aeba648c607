"""Groups of rows that are moved apart, so that each begins at a multiple of a number of rows."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    def of(cls, offsets_E: Tensor, unit: int) -> "AlignedGroups":
        """Waits once for the device, for the ends [E] of the groups."""
        counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)).long()
        padded_E = (counts_E + (unit - 1)) // unit * unit
        ends_E = padded_E.cumsum(0)
        offsets, ends = torch.stack((offsets_E, ends_E)).tolist()
        group_W = torch.searchsorted(ends_E, torch.arange(ends[-1], device=ends_E.device), right=True)
        if ends == offsets:
            return cls(ends, group_W, None)
        rows_R = torch.arange(offsets[-1], device=ends_E.device)
        shift_E = ends_E - padded_E - (offsets_E - counts_E)
        return cls(ends, group_W, rows_R + shift_E[torch.searchsorted(offsets_E.long(), rows_R, right=True)])

    @classmethod
    def equal(cls, groups: int, size: int, unit: int, device: torch.device) -> "AlignedGroups":
        """Of equal groups, without waiting."""
        padded = -(-size // unit) * unit
        ends = list(range(padded, groups * padded + 1, padded))
        group_W = torch.arange(groups * padded, device=device) // padded
        if padded == size:
            return cls(ends, group_W, None)
        rows_R = torch.arange(groups * size, device=device)
        return cls(ends, group_W, rows_R + rows_R // size * (padded - size))

    @property
    def num_rows(self) -> int:
        """Of all groups, before."""
        return self.ends[-1] if self.place_R is None else len(self.place_R)

    @property
    def sizes(self) -> list[int]:
        return [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def place(self, x_RK: Tensor) -> Tensor:
        """[W, K]; rows past the last group are left out."""
        if self.place_R is None:
            return x_RK[: self.ends[-1]]
        x_WK = x_RK.new_zeros(len(self.group_W), x_RK.shape[1])
        return x_WK.index_copy(0, self.place_R, x_RK[: self.num_rows])

    def take(self, x_WK: Tensor) -> Tensor:
        """The rows of the groups, as they were before."""
        return x_WK if self.place_R is None else x_WK[self.place_R]

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        for group, (start, end) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
            if end > start:
                yield group, slice(start, end)
