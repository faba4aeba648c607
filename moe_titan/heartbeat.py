"""A rank that has died or hangs is named, and ends the run.

A collective that misses a rank waits on a GPU for its own timeout, and then tells neither of the rank nor at once. So every rank
counts in the store of the process group, in a thread of its own, and watches the count of the next one.
"""

import os
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import Store

_GONE, _DONE = "gone", "done"


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may wait for the device for good


class Heartbeat:
    """Counts and watches from construction to :meth:`close`, or to the end of the process group.

    A rank is given up a little before the collectives are. Only turns of this thread count as time, so that ranks which were
    suspended together go on together.

    Args:
        store: of these ranks alone; a connection of its own is opened.
        timeout: of the collectives, in seconds. May be set at any time.
        period: seconds between counts.
        end: called with what happened; must not return to a rank that goes on.
    """

    def __init__(
        self, store: Store, rank: int, world: int, timeout: float, period: float = 2.0, end: Callable[[str], None] = _end
    ):
        self.timeout = timeout
        self._rank, self._next, self._period, self._end = rank, (rank + 1) % world, period, end
        self._closed, self._group = threading.Event(), dist.group.WORLD
        self._thread = None
        if world > 1:
            self._store = store.clone()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nobody waits for this rank any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._count_and_watch()
        except RuntimeError as error:  # of the store; at the end of a run it may go before others do
            if not self._closed.wait(self.timeout) and self._group is dist.group.WORLD:
                self._end(f"rank {self._rank} lost the store of the process group, which rank 0 or its launcher holds: {error}")

    def _count_and_watch(self) -> None:
        count, last, missed = 0, b"", 0.0
        while not self._closed.wait(self._period) and self._group is dist.group.WORLD:
            count += 1
            self._store.set(f"{self._rank}", f"{count}")
            if self._store.check([_GONE]):
                self._end(self._store.get(_GONE).decode())
                return
            now = self._store.get(f"{self._next}") if self._store.check([f"{self._next}"]) else b""
            missed = 0.0 if now != last or now == _DONE.encode() else missed + self._period
            last = now
            if missed > max(self.timeout - 3 * self._period, self.timeout / 2):
                message = (
                    f"rank {self._next} has given no sign of life for {missed:g} s: it has died or hangs, or its host is out of "
                    "reach; look into its log first"
                )
                self._store.set(_GONE, message)
                self._end(message)
                return
        self._store.set(f"{self._rank}", _DONE)
