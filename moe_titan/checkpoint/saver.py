"""Saving states one after the other, at once or in the background."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from moe_titan.checkpoint.deferred import SavePlanner
from moe_titan.checkpoint.errors import SaveError, first_cause
from moe_titan.checkpoint.folder import RunFolder, complete_steps
from moe_titan.checkpoint.staging import Staging
from moe_titan.checkpoint.writer import Writer

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(hours=2)
"""For the slowest rank's files, for which the others wait."""


class _Save(NamedTuple):
    step: int
    future: Future


class Saver:
    """Writes states as steps of a run's folder. All ranks must call its methods together.

    Args:
        mode: ``checkpoint.async_mode``.
        layout: parallel degrees, for the manifest.
    """

    def __init__(self, folder: RunFolder, mode: str, checksums: bool, layout: dict[str, int], device: torch.device):
        self._folder, self._checksums, self._layout = folder, checksums, layout
        self._background = mode != "disabled"
        self._staging = Staging(keep=mode == "async_with_pinned_mem")
        # A thread begins on the first GPU.
        initializer = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "save", *initializer)
        self._current: _Save | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank's part of a save in the background is unfinished."""
        return self._current is not None and not self._current.future.done()

    def write(self, step: int, state: dict[str, Any], wait: bool) -> None:
        """Saves a state, after the one before. In the background, unless told to wait, from a copy of it.

        Raises:
            SaveError: this save has failed, if waited for, or the one before.
        """
        self.settle()
        staged = self._background and not wait
        writer = Writer(self._folder.aside(step), self._layout, self._checksums, commit=lambda: self._folder.commit(step))
        planner = SavePlanner(self._staging.copy(state) if staged else state)
        self._current = _Save(step, self._thread.submit(self._save, planner, writer, self._group))
        if not staged:
            self.settle()

    def hold(self) -> None:
        """To be called before anything that is being saved changes on the device."""
        self._staging.hold()

    def settle(self) -> None:
        """Waits for the save that is under way, if any.

        Raises:
            SaveError: it has failed; nothing of it is left.
        """
        if self._current is None:
            return
        step, future = self._current
        self._current = None
        if (error := future.exception()) is None:
            logger.info("saved %s", self._folder.step(step))
            return
        if dist.get_rank() == 0:
            self._folder.clean()
        newest = max(complete_steps(self._folder.path), default=None)
        left = "no step has been saved yet" if newest is None else f"step {newest} is complete, and this run continues from it"
        raise SaveError(
            f"step {step} could not be saved as {self._folder.step(step)} ({first_cause(error)}). In that folder {left} once "
            "the cause is gone: free space or grant permission there, keep fewer steps with checkpoint.keep_latest_k, or "
            "choose another job.dump_folder or checkpoint.folder"
        ) from (None if _from_outside(error) else error)

    def _save(self, planner: SavePlanner, writer: Writer, group: dist.ProcessGroup) -> None:
        self._staging.wait()
        dcp.save(planner.state, storage_writer=writer, planner=planner, process_group=group)

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """Of its own, because training goes on in the others, and made with the first save, because they get a short timeout."""
        return dist.new_group(backend="gloo", timeout=TIMEOUT)


def _from_outside(error: BaseException) -> bool:
    """Whether disk or permissions are to blame, where a traceback into this code says nothing."""
    failures = getattr(error, "failures", {0: (error, None)})
    return all(isinstance(cause, OSError) for cause, _ in failures.values())
