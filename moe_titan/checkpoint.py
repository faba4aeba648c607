"""Saving and resuming a run with torch.distributed.checkpoint, under the keys of torchtitan 0.2.2.

Every tensor is saved with its place in the whole, so that any layout loads what any other saved. Optimizer state lies under
``optimizer.state.<parameter>.<moment>``; fused expert weights appear as the two parameters they hold.
"""

import io
import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moe_titan.data import DataLoader
from moe_titan.engine import Engine
from parallelisms.sharding_plan import logical_tensors

if TYPE_CHECKING:
    from moe_titan.config import Config

logger = logging.getLogger(__name__)

CORPUS_KEYS = (
    *(f"training.{key}" for key in ("dataset", "dataset_config", "dataset_split", "text_key", "tokenizer")),
    "debug.seed",
)
"""What a position in the data is a position in. Files may have moved, so their path is not among it."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CheckpointError(ValueError):
    """A checkpoint that was asked for cannot be loaded; the message says which and why."""


class Found(NamedTuple):
    """A checkpoint to start from, wholly or with its model alone."""

    path: Path
    model_only: bool


def find_checkpoint(config: "Config") -> Found | None:
    """The newest complete checkpoint of the run (or ``load_step``), else ``initial_load_path``, else None.

    Raises:
        CheckpointError: what was asked for is not there.
    """
    settings, folder = config.checkpoint, _folder(config)
    steps, wanted = complete_steps(folder), settings.load_step
    if wanted != -1 and wanted not in steps:
        raise CheckpointError(
            f"checkpoint.load_step = {wanted}: {folder} holds the steps {sorted(steps) or 'none'}; "
            "name one of them, or -1 for the newest"
        )
    if steps:
        return Found(folder / f"step-{max(steps) if wanted == -1 else wanted}", model_only=False)
    if settings.initial_load_path is None:
        return None
    path = Path(settings.initial_load_path)
    if not (path / ".metadata").exists():
        raise CheckpointError(
            f"checkpoint.initial_load_path = {path}: no complete checkpoint is there (no .metadata); "
            "give the folder of one step, such as outputs/checkpoint/step-1000"
        )
    return Found(path, settings.initial_load_model_only)


def complete_steps(folder: Path) -> set[int]:
    """Steps of which the folder holds a complete checkpoint."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in folder.glob("step-*/.metadata"))
    return {int(match[1]) for match in found if match}


def _folder(config: "Config") -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


class Progress(NamedTuple):
    """How far a run is: optimizer steps and tokens trained, and the steps that its learning rate has gone through."""

    step: int = 0
    tokens: int = 0
    schedule_step: int = 0


class Checkpointer:
    """Saves and loads all of a run's state: model, optimizer, schedule, position in the data, random numbers.

    A checkpoint is complete once its ``.metadata`` exists, which is written last; incomplete ones are never loaded.

    Args:
        config: of it the section ``checkpoint`` and the optimizer's settings, which are saved for torchtitan.
    """

    def __init__(self, config: "Config", engine: Engine, data: DataLoader):
        self.config, self.settings, self.engine, self.data = config, config.checkpoint, engine, data
        self.folder = _folder(config)

    def save(self, progress: Progress, next_lr: float, last: bool = False) -> None:
        """Writes ``step-N``, then removes the oldest beyond ``keep_latest_k``.

        Args:
            next_lr: learning rate of the step to come, which torchtitan reads from the checkpoint.
        """
        target = self.folder / f"step-{progress.step}"
        masters = self.engine.optimizer.masters()
        if last and self.settings.last_save_model_only:
            state = self._model_state(masters, DTYPES[self.settings.export_dtype])
        else:
            state = self._model_state(masters) | self._run_state(progress) | self._torchtitan_state(progress, next_lr)
        if dist.get_rank() == 0:
            # Until the new one is complete there is none. This rank plans the writing: none has begun on the others.
            shutil.rmtree(target, ignore_errors=True)
            self._set_aside_later(progress.step)
        dcp.save(state, checkpoint_id=target)
        logger.info("saved %s", target)
        if dist.get_rank() == 0 and self.settings.keep_latest_k:
            for old in sorted(complete_steps(self.folder))[: -self.settings.keep_latest_k]:
                shutil.rmtree(self.folder / f"step-{old}")

    def _set_aside_later(self, step: int) -> None:
        """Renames the checkpoints of a branch that this run left by going back, so that none of them counts as its newest."""
        for later in sorted(complete_steps(self.folder)):
            if later > step:
                aside = self.folder / f"abandoned-step-{later}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / f"step-{later}").rename(aside)
                logger.warning("step %d of the run that this one went back from is now %s", later, aside)

    def load(self, found: Found) -> Progress:
        """Loads a checkpoint; returns how far its run was, nothing for a model alone.

        Raises:
            CheckpointError: it lacks state that this run needs, or is of another model or global batch; nothing has been changed.
        """
        path, model_only = found
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        masters = self.engine.optimizer.masters()
        state = self._model_state(masters)
        if not model_only:
            if "train_state.step" not in saved:
                raise CheckpointError(
                    f"{path} holds a model alone, and training cannot continue from it. To start a new run with this model, set "
                    "checkpoint.initial_load_path to it and job.dump_folder to another folder; to continue this run, set "
                    "checkpoint.load_step to a step that was saved in full"
                )
            state |= self._wanted_run_state(saved)
        _check(state, saved, path)
        dcp.load(state, checkpoint_id=path)
        self.engine.optimizer.load_masters(masters)
        for name, buffer in self._buffers():
            buffer.copy_(state[name])
        if model_only:
            logger.info("starting with the model of %s", path)
            return Progress()
        self._restore(state)
        logger.info("resumed from %s", path)
        keys = ("train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch")
        return Progress(*(int(state.get(key, 0)) for key in keys))

    def _model_state(self, masters: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.engine.optimizer.parameters.items()}
        # Tied parameters stand under each of their names.
        every = self.engine.model.named_parameters(remove_duplicate=False)
        parameters = {name: masters[names[parameter]] for name, parameter in every}
        if dtype is not None:
            parameters = {name: p.to(dtype) for name, p in parameters.items()}
        state = {logical: part for name, p in parameters.items() for logical, part in logical_tensors(name, p)}
        return state | {name: buffer.clone() for name, buffer in self._buffers()}

    def _run_state(self, progress: Progress) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        state: dict[str, Any] = {}
        for name, moment, tensor in optimizer.moments():
            for logical, part in logical_tensors(name, tensor):
                state[f"optimizer.state.{logical}.{moment}"] = part
        for name, count in optimizer.step_counts():
            for logical, _ in logical_tensors(name, optimizer.parameters[name]):
                state[f"optimizer.state.{logical}.step"] = count.cpu().clone()
        return state | {
            "lr_scheduler.last_epoch": progress.schedule_step,
            "train_state.step": progress.step,
            "train_state.ntokens_seen": progress.tokens,
            "dataloader.position": self._data_position(),
            "dataloader.corpus": json.dumps({key: self.config.get(key) for key in CORPUS_KEYS}),
            f"rng.rank_{dist.get_rank()}": _random_state(self.engine.device),
        }

    def _wanted_run_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        excluded = tuple(f"{part}." for part in self.settings.exclude_from_loading)
        wanted = {key: value for key, value in self._run_state(Progress()).items() if not key.startswith(excluded)}
        # A run on more ranks than the saved one, and one that torchtitan saved, has no random numbers to continue with.
        optional = ("rng.", "dataloader.corpus")
        return {key: value for key, value in wanted.items() if key in saved or not key.startswith(optional)}

    def _torchtitan_state(self, progress: Progress, next_lr: float) -> dict[str, Any]:
        """What torchtitan wants to find besides, and this project takes from the configuration."""
        optimizer, lr = self.engine.optimizer, self.config.optimizer.lr
        adam = torch.optim.AdamW([torch.empty(0)], **optimizer.settings)
        group = adam.defaults | {"lr": next_lr, "initial_lr": lr}
        schedule = {
            "base_lrs": [lr],
            "_last_lr": [next_lr],
            "_step_count": progress.schedule_step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
        }
        state = {f"lr_scheduler.{key}": value for key, value in schedule.items()}
        for name, parameter in optimizer.parameters.items():
            for logical, _ in logical_tensors(name, parameter):
                state |= {f"optimizer.param_groups.{logical}.{key}": value for key, value in group.items()}
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        """What :func:`dcp.load` cannot write in place. Moments and parameters have been."""
        for name, count in self.engine.optimizer.step_counts():
            logical, _ = next(iter(logical_tensors(name, self.engine.optimizer.parameters[name])))
            if (key := f"optimizer.state.{logical}.step") in state:
                count.copy_(state[key])
        for key, value in json.loads(state.get("dataloader.corpus", "{}")).items():
            if self.config.get(key) != value:
                what = f"the position in the data is of a run with {value!r}; go back to it, or read the data from its start by"
                raise CheckpointError(self.config.problem(key, f'{what} checkpoint.exclude_from_loading = ["dataloader"]'))
        if "dataloader.position" in state:
            try:
                self.data.load_state_dict({"position": state["dataloader.position"]})
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        if (key := f"rng.rank_{dist.get_rank()}") in state:
            _set_random_state(state[key], self.engine.device)

    def _data_position(self) -> Tensor:
        """Where every stream of the global batch stands, put together from the data ranks."""
        position = self.data.state_dict()["position"].to(self.engine.device)
        if self.engine.mesh.data_group is not None:
            dist.all_reduce(position, group=self.engine.mesh.data_group)
        return position.cpu()

    def _buffers(self) -> Iterable[tuple[str, Tensor]]:
        model = self.engine.model
        persistent = model.state_dict().keys()
        return [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]


def _check(state: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError unless a checkpoint's metadata has all of ``state``, in the same shapes."""
    if missing := sorted(state.keys() - saved.keys()):
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(state)} entries that this run needs, first {missing[0]}; "
            "check model.name, model.flavor and model.overrides, or leave a part out with checkpoint.exclude_from_loading"
        )
    for key, value in state.items():
        size = getattr(saved[key], "size", None)
        if not isinstance(value, Tensor) or size is None or size == value.shape:
            continue
        if key == "dataloader.position":
            raise CheckpointError(
                f"training.global_batch_size = {len(value)}: the data position in {path} is of a run with {size[0]}, and "
                f'continues with no other; set training.global_batch_size = {size[0]}, or add "dataloader" to '
                "checkpoint.exclude_from_loading to read the data from its start"
            )
        raise CheckpointError(
            f"{path} holds {key} in shape {list(size)}, but this run needs {list(value.shape)}; "
            "check model.name, model.flavor and model.overrides"
        )


def _random_state(device: torch.device) -> io.BytesIO:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def _set_random_state(buffer: io.BytesIO, device: torch.device) -> None:
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
