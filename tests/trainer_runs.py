"""Whole training runs of tiny models, from the command line's arguments on, for tests of the trainer and its checkpoints."""

import contextlib
import gc
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from layout_runs import biases, full, full_parameters
from torch.distributed.checkpoint import FileSystemWriter

from float8.hardware import KERNELS
from moe_titan.checkpoint import CheckpointError, Found, SaveError
from moe_titan.data import MicroBatch
from moe_titan.inputs import read_inputs
from moe_titan.optimizer import NonFiniteGradient, Update
from moe_titan.step_result import StepResult
from moe_titan.trainer import Trainer
from parallelisms.sharding_plan import local, logical_tensors

RUN: dict[str, Any] = {
    "training.dataset": "text",
    "training.tokenizer": "byte",
    "training.seq_len": 24,
    "training.local_batch_size": 3,
    "training.global_batch_size": 12,
    "training.steps": 6,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    # So that an element whose gradient is zero up to rounding moves little: Adam would blow the rounding up to a full step.
    "optimizer.eps": 1e-6,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.min_lr_factor": 0.1,
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1,
    "metrics.progress_bar": False,
    "checkpoint.enable": True,
    "checkpoint.interval": 3,
    "checkpoint.last_save_model_only": False,
}
_QWEN3 = {"vocab_size": 264, "dim": 24, "head_dim": 8, "n_layers": 2, "n_heads": 8, "n_kv_heads": 8}
_DEEPSEEK = {
    "vocab_size": 264,
    "dim": 24,
    "inter_dim": 40,
    "moe_inter_dim": 16,
    "n_layers": 2,
    "n_heads": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_args.num_experts": 6,
    "moe_args.num_shared_experts": 1,
    "moe_args.top_k": 2,
}


def _model(name: str, flavor: str, overrides: dict[str, Any]) -> dict[str, Any]:
    return {"model.name": name, "model.flavor": flavor} | {f"model.overrides.{k}": v for k, v in overrides.items()}


MODELS = {
    "qwen3": _model("qwen3", "debugmodel_moe", _QWEN3 | {"moe_inter_dim": 16, "moe_args.num_experts": 8, "moe_args.top_k": 2}),
    "qwen3_tied": _model("qwen3", "debugmodel", _QWEN3 | {"hidden_dim": 32}),
    "llama3": _model("llama3", "debugmodel", {"vocab_size": 264, "dim": 32, "n_layers": 2, "n_heads": 4, "multiple_of": 16}),
    "deepseek": _model("deepseek_v3", "debugmodel", _DEEPSEEK | {"moe_args.score_func": "sigmoid"}),
    "deepseek_flex": _model("deepseek_v3", "debugmodel_flex_attn", _DEEPSEEK),
}
_DEGREES = {
    "dpr": "data_parallel_replicate",
    "dps": "data_parallel_shard",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}


def layout(**degrees: int) -> dict[str, int]:
    return {f"parallelism.{_DEGREES[name]}_degree": degree for name, degree in degrees.items()}


def write_corpus(path: Path, documents: int = 60) -> Path:
    """Words in random order, in documents of many lengths."""
    random = np.random.default_rng(0)
    words = ["route", "expert", "token", "gate", "mesh", "shard", "fold", "rank", "loss", "step"]
    path.mkdir()
    for document in range(documents):
        text = " ".join(random.choice(words, size=random.integers(1, 60)))
        (path / f"{document:02}.txt").write_text(text)
    return path


def arguments(corpus: Path, folder: Path, *settings: dict[str, Any]) -> list[str]:
    """The command line of a tiny run; later settings win over earlier ones and over ``RUN``."""
    merged = dict(RUN)
    for more in settings:
        merged |= more
    merged |= {"training.dataset_path": corpus, "job.dump_folder": folder}
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in merged.items()]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(trainer: Trainer) -> dict[str, Any]:
    """Everything that a run carries from one step to the next, tensors whole and under torchtitan's names."""
    with trainer.engine.placement.by_number():
        return _state(trainer)


def _state(trainer: Trainer) -> dict[str, Any]:
    optimizer = trainer.engine.optimizer
    moments = {
        f"{logical}.{moment}": full(part)
        for name, moment, tensor in optimizer.moments()
        for logical, part in logical_tensors(name, tensor)
    }
    return {
        "parameters": full_parameters(trainer.engine),
        "moments": moments,
        "counts": {name: count.item() for name, count in optimizer.step_counts()},
        "bias": biases(trainer.engine),
        "placement": {layer: np.array(slots) for layer, slots in trainer.engine.placement.expert_of_slot.items()},
        "position": trainer.data.state_dict()["position"].numpy(),
        "random": torch.get_rng_state().numpy(),
        "progress": (trainer.step, trainer.tokens, trainer.schedule_step),
    }


def run(arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains as train.py does; returns the state at the start and at the end."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    train = trainer.engine.step

    def step(batches: list, lr: float) -> StepResult:
        torch.rand(1 + dist.get_rank())  # as dropout would, other numbers on every rank
        return train(batches, lr)

    trainer.engine.step = step
    start = state(trainer)
    trainer.train()
    end = state(trainer)
    trainer.close()
    return start, end


def main(arguments: list[str]) -> tuple[int, str, bool]:
    """Exit code and standard error of train.py, and whether it waited before it ended."""
    import train

    sys.argv = ["train.py", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as error, patch("time.sleep") as sleep:
        code = train.main()
    return code, error.getvalue(), sleep.called


def main_as_on_hopper(arguments: list[str]) -> tuple[int, str, bool]:
    """The same where the configuration is told of kernels for FP8, as whose references the CPU computes."""
    with patch("moe_titan.config.low_precision.runnable", lambda part, _: KERNELS[part]):
        return main(arguments)


def refused_load(arguments: list[str], path: Path, model_only: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What CheckpointError says of a checkpoint, and the state before and after."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    before = state(trainer)
    try:
        trainer.checkpointer.load(Found(path, model_only))
    except CheckpointError as error:
        return str(error), before, state(trainer)
    raise AssertionError("the checkpoint was loaded")


def crash_while_saving(arguments: list[str]) -> str:
    """Ends when the first checkpoint's shards have been written and its metadata has not."""

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    FileSystemWriter.finish = crash
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    try:
        trainer.train()
    except SaveError:
        return "crashed"
    return "finished"


def failing_run(arguments: list[str], tweak: Callable[[Trainer], None]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The error that a run ends with, and the parameters before and after the failed step."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    tweak(trainer)
    try:
        trainer.train()
    except NonFiniteGradient as error:
        return "\n".join([str(error), *error.__notes__]), trainer.before, full_parameters(trainer.engine)
    raise AssertionError("the run did not fail")


def slow_data_run(arguments: list[str], seconds: float) -> None:
    """A run that waits so long for each step's data."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    read = trainer.data.next_step

    def next_step() -> list[MicroBatch]:
        time.sleep(seconds)
        return read()

    trainer.data.next_step = next_step
    trainer.train()
    trainer.close()


def infinite_gradient_on_rank_1(trainer: Trainer) -> None:
    """In step 5, in two parameters."""
    optimizer = trainer.engine.optimizer
    update = optimizer.step

    def step(lr: float, max_norm: float) -> Update:
        if trainer.step == 4:
            trainer.before = full_parameters(trainer.engine)
            for name in ("layers.1.moe.experts.w2", "norm.weight"):
                if dist.get_rank() == 1:
                    local(optimizer.parameters[name].grad).view(-1)[-1] = float("inf")
        return update(lr, max_norm)

    optimizer.step = step


def weight_is_nan_on_rank_1(trainer: Trainer) -> None:
    """From step 5 on."""
    train = trainer.engine.step

    def step(batches: list, lr: float) -> StepResult:
        if trainer.step == 4:
            if dist.get_rank() == 1:
                local(trainer.engine.optimizer.parameters["layers.0.ffn_norm.weight"].detach())[0] = float("nan")
            trainer.before = full_parameters(trainer.engine)
        return train(batches, lr)

    trainer.engine.step = step


def tied_weights(arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Embedding and head before and after training."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    model = trainer.engine.model

    def weights() -> dict[str, Any]:
        return {name: full(getattr(model, name).weight) for name in ("tok_embeddings", "output")}

    before = weights()
    trainer.train()
    return before, weights()


def collections_and_timeout(arguments: list[str]) -> tuple[list[tuple], bool, float]:
    """Calls of the garbage collector while training, whether it also runs by itself, and the collectives' timeout at the end."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    with patch("gc.collect") as collect:
        trainer.train()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [call.args for call in collect.call_args_list], gc.isenabled(), backend.options._timeout.total_seconds()
