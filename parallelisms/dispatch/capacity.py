"""A bound on the rows that nvlink's fixed shapes give to the experts, and the word that it was too small."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)


class RowCapacity:
    """How many rows the experts of a rank have room for in each layer; one object for all layers.

    Rows beyond that are left out, and noted on the device. Whoever runs the layers takes the note afterwards, uses none of the
    results if it says so, and runs the layers again with the bound :meth:`lifted`.

    Args:
        factor: times the rows that a rank gets when loads are even; None for room for all that can arrive.
        device: where the layers run.

    ``noted`` is for others who bound rows too and take :meth:`note` of it: they set it.
    """

    def __init__(self, factor: float | None, device: torch.device):
        self._factor, self.noted, self.is_lifted = factor, False, False
        self._exceeded = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def bounded(self) -> bool:
        return (self._factor is not None or self.noted) and not self.is_lifted

    def rows(self, even: int, most: int) -> int:
        """Rows to make room for, when a rank gets ``even`` rows under even loads and ``most`` at most."""
        return most if self._factor is None or self.is_lifted else min(ceil(self._factor * even), most)

    def cut(self, row_P: Tensor, offsets_e: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Leaves out the rows for which there is no room.

        Args:
            row_P: integers, each pair's row, -1 for none.
            offsets_e: where each expert's rows end.
        """
        self.note(offsets_e[-1:] > rows)
        return torch.where(row_P < rows, row_P, -1), offsets_e.clamp(max=rows)

    def note(self, exceeded: Tensor) -> None:
        """``exceeded``: one-element bool tensor, whether rows have been left out."""
        self._exceeded |= exceeded

    def take_exceeded(self) -> Tensor | None:
        """Whether a layer of any rank wanted more rows since the last time: a bool scalar on the device, None without a bound.

        Collective; the host does not wait.
        """
        if not self.bounded:
            return None
        dist.all_reduce(self._exceeded, dist.ReduceOp.MAX)
        found = self._exceeded[0] > 0
        self._exceeded.zero_()
        return found

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Room for all rows, for repeating what has exceeded the bound."""
        allowed = "moe.capacity_factor or moe.stash_factor allows"
        logger.warning("an expert rank got more rows than %s; the step is repeated with room for all", allowed)
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted = False
