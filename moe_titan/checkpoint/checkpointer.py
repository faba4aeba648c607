"""A run's checkpoints: when they are saved, what they hold, and how a run starts from one."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from moe_titan.checkpoint.compare import check
from moe_titan.checkpoint.deferred import as_written
from moe_titan.checkpoint.errors import CheckpointError
from moe_titan.checkpoint.folder import Found, RunFolder, run_folder
from moe_titan.checkpoint.reader import StoredRun
from moe_titan.checkpoint.requests import Requests
from moe_titan.checkpoint.saver import Saver
from moe_titan.checkpoint.state import Progress, RunState
from moe_titan.data import DataLoader
from moe_titan.engine import Engine
from moe_titan.interchange.dialects import to_dialect

if TYPE_CHECKING:
    from moe_titan.config import Config

logger = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Due(NamedTuple):
    """What is to be done after a step: ``save``, and ``end`` the run, before which a save is to be complete (``wait``)."""

    save: bool = False
    wait: bool = False
    end: bool = False


class Checkpointer:
    """Saves and loads all of a run's state. All ranks must call its methods together.

    From its construction on, unless checkpoint.load_only, the process saves on SIGUSR1 and ends only between steps on SIGTERM.

    Args:
        config: of it the section ``checkpoint``, and what :class:`RunState` takes.
    """

    def __init__(self, config: "Config", engine: Engine, data: DataLoader):
        self.settings = settings = config.checkpoint
        self._state = RunState(config, engine, data)
        if settings.load_only:
            return
        self._folder = folder = RunFolder(run_folder(config), settings.keep_latest_k, settings.keep_every)
        if dist.get_rank() == 0:
            folder.clean()
        layout = asdict(engine.mesh.layout)
        self._saver = Saver(folder, settings.async_mode, settings.checksums, layout, engine.device)
        engine.optimizer.before_change = self._saver.hold
        self._requests = Requests(settings.interval_minutes)

    def due(self, step: int, last: bool) -> Due:
        """Whether a save is due after this step, by its number or by the clock or by a signal.

        Raises:
            SaveError: a save in the background has failed.
        """
        if self.settings.load_only:
            return Due()
        agreed = self._requests.agree(self._saver.writing)
        if not agreed.writing:
            self._saver.settle()
        if agreed.end:
            logger.warning("SIGTERM: step %d is saved, and the run ends", step)
        first = step == 1 and self.settings.enable_first_step_checkpoint
        save = last or first or agreed.end or agreed.save or step % self.settings.interval == 0
        return Due(save, wait=last or agreed.end, end=agreed.end)

    def save(self, progress: Progress, next_lr: float, last: bool = False, wait: bool = True) -> None:
        """Writes ``step-N``, then removes those that are not to be kept any longer.

        Args:
            next_lr: learning rate of the step to come, which torchtitan reads from the checkpoint.
            last: it ends the run, for which ``last_save_model_only`` is.
            wait: until it is complete, even where checkpoint.async_mode lets it be saved in the background.

        Raises:
            SaveError: this save has failed, or the one before.
        """
        with self._state.engine.placement.by_number():
            alone = last and self.settings.last_save_model_only
            dtype = DTYPES[self.settings.export_dtype] if alone else None
            state: dict[str, Any] = {key: as_written(value, dtype) for key, value in self._state.parameters().items()}
            state |= self._state.buffers()
            if not alone:
                state |= self._state.run(progress) | self._state.for_torchtitan(progress, next_lr)
            names = to_dialect(state, self.settings.dialect)
            self._saver.write(progress.step, {names[key]: value for key, value in state.items()}, wait)
        self._requests.saved()

    def load(self, found: Found) -> Progress:
        """Loads a checkpoint; returns how far its run was, nothing for a model alone.

        Raises:
            CheckpointError: it is damaged, or of another model or global batch, or holds a model alone, and nothing has been
                changed; or it is of other data.
        """
        with self._state.engine.placement.by_number():
            return self._load(*found)

    def _load(self, path: Path, model_only: bool) -> Progress:
        stored = StoredRun(path, self.settings.checksums)
        state: dict[str, Any] = self._state.parameters() | self._state.buffers()
        if not model_only:
            if "train_state.step" not in stored.entries:
                raise CheckpointError(
                    f"{path} holds a model alone, and training cannot continue from it. To start a new run with this model, set "
                    "checkpoint.initial_load_path to it and job.dump_folder to another folder; to continue this run, set "
                    "checkpoint.load_step to a step that was saved in full"
                )
            state |= self._state.wanted(stored.entries)
        check(state, stored.entries, path, whole=not model_only)
        stored.load(state)
        self._state.restore_buffers(state)
        if model_only:
            logger.info("starting with the model of %s", path)
            return Progress()
        progress = self._state.restore_run(state)
        if not self.settings.load_only:
            self._folder.newest = progress.step
        logger.info("resumed from %s", path)
        return progress
