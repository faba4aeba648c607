"""The folder of a run's checkpoints. A step is there whole or not at all, whenever the process that works here ends.

Steps are written under another name and renamed once they are whole, and renamed before they are removed. No name but a
complete step's has ``step-N`` in it, by which torchtitan searches, too.
"""

import itertools
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moe_titan.checkpoint.errors import CheckpointError
from moe_titan.interchange.metadata import METADATA

if TYPE_CHECKING:
    from moe_titan.config import Config

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A checkpoint to start from, wholly or with its model alone."""

    path: Path
    model_only: bool


def find_checkpoint(config: "Config") -> Found | None:
    """The newest complete checkpoint of the run (or ``load_step``), else ``initial_load_path``, else None.

    A checkpoint of step 0, made by ``create_seed_checkpoint``, is a model to start from.

    Raises:
        CheckpointError: what was asked for is not there, or the folder cannot be written.
    """
    settings, folder = config.checkpoint, run_folder(config)
    steps, wanted = complete_steps(folder), settings.load_step
    if not settings.load_only:
        _check_writable(config, folder)
    if settings.create_seed_checkpoint and steps:
        raise CheckpointError(
            f"checkpoint.create_seed_checkpoint = true: {folder} holds the steps {sorted(steps)} of a run; "
            "choose another job.dump_folder or checkpoint.folder"
        )
    if wanted != -1 and wanted not in steps:
        raise CheckpointError(
            f"checkpoint.load_step = {wanted}: {folder} holds the steps {sorted(steps) or 'none'}; "
            "name one of them, or -1 for the newest"
        )
    if steps:
        step = max(steps) if wanted == -1 else wanted
        return Found(folder / f"step-{step}", model_only=step == 0)
    if settings.initial_load_path is None:
        return None
    path = Path(settings.initial_load_path)
    if not (path / METADATA).exists():
        raise CheckpointError(
            f"checkpoint.initial_load_path = {path}: no complete checkpoint is there (no {METADATA}); "
            "give the folder of one step, such as outputs/checkpoint/step-1000"
        )
    return Found(path, settings.initial_load_model_only)


def complete_steps(folder: Path) -> set[int]:
    """Steps of which the folder holds a complete checkpoint."""
    found = (_step_of(path.parent) for path in folder.glob(f"step-*/{METADATA}"))
    return {step for step in found if step is not None}


def run_folder(config: "Config") -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def previous(path: Path) -> Path | None:
    """The complete checkpoint before a run's one."""
    step = _step_of(path)
    earlier = {other for other in complete_steps(path.parent) if step is not None and other < step}
    return path.parent / f"step-{max(earlier)}" if earlier else None


class RunFolder:
    """What rank 0 does in the folder.

    Args:
        keep_latest: complete steps to keep, 0 for all.
        keep_every: steps divisible by it are kept besides, 0 for none.
        newest: the newest step of the run's own: the one it started from, then the one it saved last. Later ones are of a
            branch that it left by going back.
    """

    def __init__(self, path: Path, keep_latest: int, keep_every: int, newest: int = 0):
        self.path, self._keep_latest, self._keep_every, self.newest = path, keep_latest, keep_every, newest

    def step(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def aside(self, step: int) -> Path:
        """Where a step is written."""
        return self.path / f".saving-{step}"

    def clean(self) -> None:
        """Removes what an earlier process left half written or half removed, and brings back what it had not yet replaced."""
        for path in self.path.glob(".replaced-*"):
            step = self.step(int(path.name.rpartition("-")[2]))
            if not step.exists():
                path.rename(step)
        for pattern in (".saving-*", ".removing-*", ".replaced-*"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def commit(self, step: int) -> None:
        """Gives a step that has been written aside its name, and removes those that are not to be kept any longer."""
        self._set_branch_aside()
        _sync(self.aside(step))
        replaced = self._rename(step, "replaced") if self.step(step).exists() else None
        self.aside(step).rename(self.step(step))
        _sync(self.path)
        self.newest = step
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        for old in self._outdated():
            shutil.rmtree(self._rename(old, "removing"), ignore_errors=True)

    def _set_branch_aside(self) -> None:
        """Renames the checkpoints of a branch that this run left by going back, so that none of them counts as its own."""
        for later in sorted(complete_steps(self.path)):
            if later > self.newest:
                names = (f"abandoned-{later}" + f".{n}" * (n > 0) for n in itertools.count())
                aside = next(path for path in map(self.path.joinpath, names) if not path.exists())
                self.step(later).rename(aside)
                logger.warning("step %d of the run that this one went back from is now %s", later, aside)

    def _outdated(self) -> list[int]:
        if not self._keep_latest:
            return []
        older = sorted(complete_steps(self.path))[: -self._keep_latest]
        return [step for step in older if not self._keep_every or step % self._keep_every]

    def _rename(self, step: int, what: str) -> Path:
        away = self.path / f".{what}-{step}"
        shutil.rmtree(away, ignore_errors=True)
        return self.step(step).rename(away)


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_writable(config: "Config", folder: Path) -> None:
    """Now rather than after the first hours of training. A folder that is yet to be made is job.dump_folder's matter."""
    if not folder.exists():
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"{folder} must be a folder that can be written ({error.strerror}); choose another"
        raise CheckpointError(config.problem("checkpoint.folder", f"{what}, or set checkpoint.load_only = true")) from error
