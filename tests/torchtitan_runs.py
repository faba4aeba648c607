"""Whole runs of stock torchtitan 0.2.2, from its Trainer's construction to its last step, on the CPU.

What torchtitan asks of a GPU and a CPU lacks is stood in for; its model, parallelism, optimizer, schedule, data loader and
checkpoints are its own.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torchtitan.protocols.train_spec as train_specs
import trainer_runs
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import JobConfig
from torchtitan.models.moe import utils as moe_utils

from moe_titan.config import build_model_args, load_config
from moe_titan.data import MicroBatch
from moe_titan.inputs import read_inputs
from moe_titan.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "training.mixed_precision_reduce": "float32",
    "metrics.log_freq": 1,
    "checkpoint.keep_latest_k": 0,
    # The 0 that torchtitan means by it: Qwen3's bias is the one that it never moves.
    "checkpoint.exclude_from_loading": ["dataloader"],
}


def samples(step: int, settings: dict[str, Any]) -> Tensor:
    """Tokens of a global batch [B, S + 1], which depend on the step alone."""
    size = settings["training.global_batch_size"], settings["training.seq_len"] + 1
    random = torch.Generator().manual_seed(step)
    # Some tokens are frequent, so that there is something to learn.
    return torch.randint(0, 264, size, generator=random).minimum(torch.randint(0, 264, size, generator=random))


class Samples(IterableDataset):
    """This rank's, from step ``first`` on."""

    def __init__(self, settings: dict[str, Any], first: int, rank: int, ranks: int):
        self._settings, self._step, self._rank, self._ranks = settings, first, rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for sample in samples(self._step, self._settings).tensor_split(self._ranks)[self._rank]:
                yield {"input": sample[:-1]}, sample[1:]
            self._step += 1

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = state["step"]


def train(settings: dict[str, Any], folder: Path, first: int = 1) -> list[tuple[int, float, float]]:
    """Trains as torchtitan's train.py does, from the newest checkpoint in ``folder``; ``first`` is the step that it starts with.

    Returns the number, loss and gradient norm of every step.
    """
    import torchtitan.train

    job = _job(settings | SETTINGS | {"job.dump_folder": folder})
    records: list[tuple[int, float, float]] = []
    with _on_cpu(), patch.object(train_specs, "get_train_spec", lambda name: _spec(name, settings, first)):
        trainer = torchtitan.train.Trainer(job)
        trainer.metrics_processor.log = lambda step, loss, _, norm, **__: records.append((step, float(loss), float(norm)))
        trainer.train()
        trainer.close()
    return records


def train_ours(settings: dict[str, Any], folder: Path) -> list[tuple[int, float, float]]:
    """The same with this project's trainer."""
    more = {"training.dataset": "stdlib", "checkpoint.exclude_from_loading": "dataloader", "checkpoint.keep_latest_k": 0}
    arguments = trainer_runs.arguments(folder, folder, settings, more)
    arguments = [argument for argument in arguments if not argument.startswith("--training.dataset_path")]
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    loader = iter(Samples(settings, trainer.step + 1, trainer.mesh.data_rank, trainer.mesh.layout.dp))

    def next_step() -> list[MicroBatch]:
        rows, size = settings["training.local_batch_size"], settings["training.global_batch_size"] // trainer.mesh.layout.dp
        batch = [next(loader) for _ in range(size)]
        tokens, labels = torch.stack([inputs["input"] for inputs, _ in batch]), torch.stack([labels for _, labels in batch])
        return [MicroBatch(*parts) for parts in zip(tokens.split(rows), labels.split(rows), [None] * (size // rows), strict=True)]

    trainer.data.next_step = next_step
    trainer.train()
    trainer.close()
    return [(record["step"], record["loss"], record["grad_norm"]) for record in trainer_runs.records(folder)]


def _job(settings: dict[str, Any]) -> JobConfig:
    """torchtitan's configuration with those of the keys that it has."""
    job = JobConfig()
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if hasattr(getattr(job, section, None), name):
            setattr(getattr(job, section), name, str(value) if isinstance(value, Path) else value)
    return job


def _spec(name: str, settings: dict[str, Any], first: int) -> train_specs.TrainSpec:
    """torchtitan's own model under its own name, with the arguments of the tiny one and its samples."""
    original = _ORIGINAL_SPEC(name)
    folder = Path(".")
    args = build_model_args(load_config(trainer_runs.arguments(folder, folder, settings, {"training.dataset": "stdlib"}), 2))
    args.moe_args = dataclasses.replace(args.moe_args, use_grouped_mm=False)  # which computes in bf16, whatever it is told
    return dataclasses.replace(
        original,
        model_args={settings["model.flavor"]: args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, dp_world_size, job_config, **_: ParallelAwareDataloader(
            Samples(settings, first, dp_rank, dp_world_size),
            dp_rank,
            dp_world_size,
            batch_size=job_config.training.local_batch_size,
        ),
    )


_ORIGINAL_SPEC = train_specs.get_train_spec


class _Device(MagicMock):
    """torch.cpu, and of what it lacks nothing that matters."""

    def set_device(self, device: torch.device) -> None:
        pass

    def current_device(self) -> str:
        return "cpu"


@contextmanager
def _on_cpu() -> Iterator[None]:
    import torchtitan.components.metrics as metrics
    import torchtitan.train

    set_factor = FSDPModule.set_gradient_divide_factor

    def divide(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo sums alone

    memory = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
            for attribute, value in (("device_type", "cpu"), ("device_module", _Device())):
                if attribute in vars(module):
                    stack.enter_context(patch.object(module, attribute, value))
        for owner, attribute, value in (
            (FSDPModule, "set_gradient_divide_factor", divide),
            (metrics, "build_device_memory_monitor", lambda: monitor),
            (moe_utils, "generate_permute_indices", partial(moe_utils.generate_permute_indices, use_cpu=True)),
            (torch, "histc", lambda values, bins, min, max: torch.bincount(values, minlength=bins)),
            (torchtitan.train.dist_utils, "set_pg_timeouts", lambda **_: None),
            (torchtitan.train.time, "sleep", lambda seconds: None),
        ):
            stack.enter_context(patch.object(owner, attribute, value))
        yield
