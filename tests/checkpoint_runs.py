"""What the tests of checkpoints run on every rank."""

import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trainer_runs
from layout_runs import relative_error
from torch.distributed.checkpoint import FileSystemWriter

from kernels.adamw import join_fp32, split_fp32
from moe_titan.checkpoint import CheckpointError, Found, Progress, SaveError, complete_steps
from moe_titan.checkpoint.folder import RunFolder
from moe_titan.checkpoint.reader import StoredRun
from moe_titan.checkpoint.saver import Saver
from moe_titan.checkpoint.staging import Staging
from moe_titan.inputs import read_inputs
from moe_titan.trainer import Trainer

LAYOUT = {"dp_shard": 1}


@contextmanager
def trainer_in_this_group(arguments: list[str]) -> Iterator[Trainer]:
    """One of several trainers on the ranks of one process group."""
    os.environ["RANK"] = str(dist.get_rank())
    with patch("moe_titan.trainer.start_processes", return_value=torch.device("cpu")):
        trainer = Trainer(read_inputs([*arguments], dist.get_world_size()))
    yield trainer
    trainer.data.close()
    trainer.metrics.close()
    if trainer._lock is not None:
        trainer._lock.close()


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Bitwise, in nested dictionaries of arrays and numbers."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_equal(actual[key], expected[key], f"{where} {key}")
    else:
        np.testing.assert_array_equal(actual, expected, strict=isinstance(expected, np.ndarray), err_msg=where)


def _scramble(trainer: Trainer) -> None:
    """Nothing that is not loaded is right by chance."""
    optimizer = trainer.engine.optimizer
    with torch.no_grad():
        for name in optimizer.parameters:
            for tensor in optimizer.tensors(name):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        for _, count in optimizer.step_counts():
            count.fill_(-1)
        for name, buffer in trainer.engine.model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.fill_(float("nan"))


def _without_random(state: dict[str, Any]) -> dict[str, Any]:
    """Without what is a rank's, not the run's: random numbers, and its own streams' position, which training on compares."""
    return {key: value for key, value in state.items() if key not in ("random", "position")}


def save_on_every_layout(corpus: Path, folder: Path, model: dict, layouts: dict[str, dict]) -> tuple[dict, dict, list[dict]]:
    """Trains three steps on the first layout; what it saves travels to each other one and is saved from there.

    Returns the state after them, and the state after and the records of three more steps on the first layout.
    """
    first, *others = layouts
    common = {"checkpoint.last_save_model_only": False}
    with trainer_in_this_group(trainer_runs.arguments(corpus, folder / first, model, common, layouts[first])) as trainer:
        steps, after = trainer.engine.step, []

        def step(batches: list, lr: float) -> Any:
            if trainer.step == 3:
                after.append(trainer_runs.state(trainer))
            return steps(batches, lr)

        trainer.engine.step = step
        trainer.train()
        end = trainer_runs.state(trainer)
    for name in others:
        with trainer_in_this_group(trainer_runs.arguments(corpus, folder / name, model, layouts[name])) as trainer:
            progress = trainer.checkpointer.load(Found(folder / first / "checkpoint" / "step-3", model_only=False))
            trainer.checkpointer.save(progress, next_lr=0.0)
    records = trainer_runs.records(folder / first) if dist.get_rank() == 0 else []
    return after[0], end, records[3:]


def load_on_every_layout(
    corpus: Path, folder: Path, model: dict, layouts: dict[str, dict], same: str, expected: dict, end: dict, later: list[dict]
) -> list[str]:
    """Loads the checkpoints of all layouts on each of ``layouts`` and trains on from the last. Returns what has been compared.

    Args:
        same: the layout on which the run went on to ``end``, with the records ``later``.
    """
    compared = []
    paths = sorted(folder.glob("*/checkpoint/step-3"))
    for number, (name, degrees) in enumerate(layouts.items()):
        arguments = trainer_runs.arguments(corpus, folder / f"loads on {name}", model, {"checkpoint.load_only": True}, degrees)
        with trainer_in_this_group(arguments) as trainer:
            for path in paths[number:] + paths[:number]:
                _scramble(trainer)
                progress = trainer.checkpointer.load(Found(path, model_only=False))
                trainer.step, trainer.tokens, trainer.schedule_step = progress
                assert_equal(_without_random(trainer_runs.state(trainer)), _without_random(expected), f"{path} on {name}")
                compared.append(f"{path.parent.parent.name} on {name}")
            trainer.train()
            reached = _without_random(trainer_runs.state(trainer))
        if name == same:
            assert_equal(reached, _without_random(end), name)
        for kind in ("parameters", "moments"):
            for key, value in end[kind].items():
                assert relative_error(reached[kind][key], value) <= 1e-5, f"{key} on {name}"
        if dist.get_rank() == 0:
            _compare_records(trainer_runs.records(folder / f"loads on {name}"), later, 0.0 if name == same else 1e-5)
    return compared


def _compare_records(records: list[dict], later: list[dict], tolerance: float) -> None:
    assert [record["step"] for record in records] == [4, 5, 6]
    for actual, wanted in zip(records, later, strict=True):
        assert (actual["tokens"], actual.get("expert_load")) == (wanted["tokens"], wanted.get("expert_load"))
        for key in ("loss", "grad_norm", "mtp_loss"):
            assert relative_error(actual[key], wanted[key]) <= tolerance, key


def errors_of_loads(cases: list[Path], checksums: bool = True) -> list[str | None]:
    """What CheckpointError says of each checkpoint when all of its tensors and objects are loaded; None if nothing."""
    errors: list[str | None] = []
    for path in cases:
        try:
            stored = StoredRun(path, checksums)
            state = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
                for key, entry in stored.entries.items()
            }
            stored.load(state)
            errors.append(None)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def _saver(folder: Path, mode: str, keep: int = 0) -> Saver:
    return Saver(RunFolder(folder, keep, 0), mode, True, LAYOUT, torch.device("cpu"))


class SlowFinish:
    """Lets rank 0 finish a save only when told to."""

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self._finish = FileSystemWriter.finish

    def __enter__(self) -> "SlowFinish":
        def finish(writer: FileSystemWriter, *args: Any) -> None:
            assert self.may_finish.wait(30)
            self._finish(writer, *args)

        FileSystemWriter.finish = finish
        return self

    def __exit__(self, *_: Any) -> None:
        FileSystemWriter.finish = self._finish


def save_in_background(folder: Path, mode: str) -> dict[str, Any]:
    """Two saves, of which the first is held up while training changes the tensors."""
    saver, rank = _saver(folder, mode), dist.get_rank()
    state = {f"a.{rank}": torch.full((70, 3), 1.0), f"b.{rank}": torch.arange(5)[::2], "n": 1, f"empty.{rank}": torch.empty(0, 2)}
    with SlowFinish() as slow:
        saver.write(1, state, wait=False)
        state[f"a.{rank}"].fill_(2.0)
        state[f"b.{rank}"].fill_(0)
        seen = {"writing": saver.writing, "complete": complete_steps(folder)}
        if rank == 0:
            threading.Timer(0.3, slow.may_finish.set).start()
        saver.write(2, state | {"n": 2}, wait=False)
        seen["complete before the second"] = 1 in complete_steps(folder)
        saver.settle()
    return seen


def save_with_error(folder: Path, mode: str, error: str) -> tuple[str, str, set[int], list[str]]:
    """A good save and one that meets an error on the last rank: its message, the cause's type, and what is in the folder."""
    saver, rank = _saver(folder, mode), dist.get_rank()
    saver.write(1, {f"a.{rank}": torch.ones(50, 40)}, wait=True)
    last = rank == dist.get_world_size() - 1
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if last and error == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    if error == "permission":
        if last:
            os.chmod(folder, 0o555)
        dist.barrier()
        if os.geteuid() == 0:
            os.seteuid(65534)
    try:
        saver.write(2, {f"a.{rank}": torch.ones(500, 400)}, wait=False)
        saver.settle()
        raise AssertionError("the save did not fail")
    except SaveError as caught:
        found = caught
    finally:
        if error == "permission" and os.geteuid() == 65534:
            os.seteuid(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    dist.barrier()
    os.chmod(folder, 0o700)
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    saver.write(3, {f"a.{rank}": torch.ones(500, 400)}, wait=True)
    return str(found), repr(found.__cause__), complete_steps(folder), names


def signalled_run(arguments: list[str], number: int | None, step: int) -> tuple[int, dict, set[int]]:
    """Sends the signal to the last rank during a step: the step at which the run ended, its state and its complete steps."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    train = trainer.engine.step

    def with_signal(batches: list, lr: float) -> Any:
        torch.rand(1 + dist.get_rank())
        if number is not None and trainer.step + 1 == step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
        return train(batches, lr)

    trainer.engine.step = with_signal
    trainer.train()
    end = trainer_runs.state(trainer)
    steps = complete_steps(Path(trainer.config.job.dump_folder) / "checkpoint")
    trainer.close()
    return trainer.step, end, steps


def main_with_sigterm(arguments: list[str]) -> tuple[int, str, bool]:
    """train.py, to which SIGTERM is sent once it has trained a step."""
    folder = Path(next(argument for argument in arguments if argument.startswith("--job.dump_folder=")).partition("=")[2])

    def send() -> None:
        while not ((log := folder / "metrics.jsonl").exists() and log.stat().st_size):
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    return trainer_runs.main(arguments)


def run_by_the_clock(arguments: list[str], minutes_a_step: float) -> set[int]:
    """Steps that are saved where each takes so long by rank 0's clock; the other ranks' stand still."""
    now = 0.0
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    train = trainer.engine.step

    def step(batches: list, lr: float) -> Any:
        nonlocal now
        now += 60 * minutes_a_step
        return train(batches, lr)

    trainer.engine.step = step
    with patch("moe_titan.checkpoint.requests.time.monotonic", lambda: now if dist.get_rank() == 0 else 0.0):
        trainer.checkpointer._requests.saved()
        trainer.train()
    return complete_steps(Path(trainer.config.job.dump_folder) / "checkpoint")


def failing_background_run(arguments: list[str], step: int) -> tuple[str, int, set[int]]:
    """A run whose disk is full when ``step`` is saved: the error, the step at which it came, and the complete steps."""
    trainer = Trainer(read_inputs(arguments, int(os.environ["WORLD_SIZE"])))
    save = trainer.checkpointer.save

    def full_disk(progress: Progress, *args: Any, **kwargs: Any) -> None:
        if progress.step == step:
            trainer.checkpointer._saver.settle()  # the save before, which may still be written in the background
            if dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))
        save(progress, *args, **kwargs)

    trainer.checkpointer.save = full_disk
    try:
        trainer.train()
    except SaveError as error:
        return str(error), trainer.step, complete_steps(Path(trainer.config.job.dump_folder) / "checkpoint")
    raise AssertionError("the run did not fail")


class LateStaging(Staging):
    """Copies as late as a GPU may: when what is copied is about to change."""

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        staged = super().copy(state)
        self._block.fill_(255)
        self._lock, self._about_to_change = threading.Lock(), threading.Event()
        self._copy_late = partial(super().copy, state)
        return staged

    def hold(self) -> None:
        if self._block is not None:
            self._finish()
            self._about_to_change.set()

    def wait(self) -> None:
        if self._block is not None:
            self._about_to_change.wait(2)  # After the last step nothing does.
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._copy_late()
            self._copy_late = lambda: None


def run_with_late_copies(arguments: list[str]) -> None:
    with patch("moe_titan.checkpoint.saver.Staging", LateStaging):
        trainer_runs.run(arguments)


def most_made_at_once(arguments: list[str]) -> tuple[int, int]:
    """A run: how many whole fp32 tensors were made of split ones or were to be split, and how many there were at once."""
    alive: list[weakref.ref] = []
    counts: list[int] = []

    def watched(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            result = function(*args)
            whole = result if isinstance(result, torch.Tensor) else args[0]
            alive.append(weakref.ref(whole))
            counts.append(sum(one() is not None for one in alive))
            return result

        return call

    with (
        patch("parallelisms.split_weights.join_fp32", watched(join_fp32)),
        patch("moe_titan.checkpoint.deferred.split_fp32", watched(split_fp32)),
    ):
        trainer_runs.run(arguments)
    return len(counts), max(counts)


def save_plain(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)
