"""What asks a run to save between its steps, or to end: signals and the clock. All ranks hear of it at the same step."""

import logging
import os
import signal
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Agreed(NamedTuple):
    """``end``: SIGTERM came to a rank; ``save``: SIGUSR1 did, or it is time; ``writing``: a rank's save is unfinished."""

    end: bool
    save: bool
    writing: bool


class Requests:
    """Listens for SIGTERM and SIGUSR1, in the main thread, for the rest of the process.

    Args:
        interval_minutes: between two saves by the clock of rank 0; 0 for none.
    """

    def __init__(self, interval_minutes: float):
        self._seconds = 60 * interval_minutes or float("inf")
        self._arrived: set[int] = set()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        logger.info("process %d of rank %d saves on SIGUSR1, and saves and ends on SIGTERM", os.getpid(), dist.get_rank())
        self.saved()

    def saved(self) -> None:
        """Takes note of a save: from now on the clock counts, and SIGUSR1 has been answered."""
        self._since = time.monotonic()
        self._arrived.discard(signal.SIGUSR1)

    def agree(self, writing: bool) -> Agreed:
        """What any rank was asked for; all ranks must call it together."""
        time_is_up = dist.get_rank() == 0 and time.monotonic() - self._since >= self._seconds
        asked = [signal.SIGTERM in self._arrived, signal.SIGUSR1 in self._arrived or time_is_up, writing]
        flags = torch.tensor(asked, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return Agreed(*map(bool, flags.tolist()))

    def _note(self, number: int, frame: Any) -> None:
        self._arrived.add(number)
