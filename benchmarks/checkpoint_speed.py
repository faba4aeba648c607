"""Speed of saving and loading beside plain writes to the same disk, and the pause that a save puts on training.

torchrun --standalone --nproc-per-node N benchmarks/checkpoint_speed.py [--modes MODE ...] --config FILE.toml [...]

Takes train.py's arguments; the checkpoints go to job.dump_folder, on the disk to be measured, one at a time. Rank 0 prints one
line of JSON per measurement; rates are of all ranks together, times those of the slowest. Of a save these are the pause before
training goes on, the time until it is complete, and that of the steps meanwhile.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist

from moe_titan.checkpoint import Checkpointer, Found, Progress
from moe_titan.inputs import read_inputs
from moe_titan.trainer import Trainer

STEPS = 8
BLOCK = 1 << 24
MODES = ("disabled", "async", "async_with_pinned_mem")
SETTINGS = ["--checkpoint.enable=true", "--checkpoint.interval=1000000", "--checkpoint.keep_latest_k=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of checkpoint.async_mode, in this order")
    options, argv = parser.parse_known_args()
    trainer = Trainer(read_inputs([*argv, *SETTINGS], int(os.environ.get("WORLD_SIZE", "1"))))
    folder = Path(trainer.config.job.dump_folder, "checkpoint")
    _steps(trainer)  # compiles
    plain_step = statistics.median(_steps(trainer))
    for mode in options.modes:
        size, digest = _measure_saves(trainer, mode, folder, plain_step)
    _measure_load(trainer, folder, size, digest)
    _write_plainly(folder, size // dist.get_world_size())
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    trainer.close()


def _steps(trainer: Trainer, number: int = STEPS) -> list[float]:
    """Seconds of each step."""
    return [_slowest(lambda: trainer.engine.step(trainer.data.next_step(), 1e-5).wait()) for _ in range(number)]


def _measure_saves(trainer: Trainer, mode: str, folder: Path, plain_step: float) -> tuple[int, int]:
    """A first save in this mode, and a second, for which memory and process group are there already.

    Returns bytes and digest of the last one.
    """
    trainer.config.checkpoint.async_mode = mode
    trainer.checkpointer = Checkpointer(trainer.config, trainer.engine, trainer.data)
    saver = trainer.checkpointer._saver
    for what in ("first", "second"):
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "step-1", ignore_errors=True)
        digest, begin = _digest(trainer), time.perf_counter()
        pause = _slowest(lambda: trainer.checkpointer.save(Progress(1, 1, 1), next_lr=1e-5, wait=False))
        during: list[float] = []
        while trainer.checkpointer._requests.agree(saver.writing).writing:
            during += _steps(trainer, 1)
        saver.settle()
        seconds = time.perf_counter() - begin
        size = sum(file.stat().st_size for file in (folder / "step-1").iterdir())
        _report(
            f"save, {mode}, {what}",
            gb=size / 1e9,
            pause_ms=1e3 * pause,
            gb_per_second_in_pause=size / 1e9 / pause,
            seconds=seconds,
            gb_per_second=size / 1e9 / seconds,
            plain_step_ms=1e3 * plain_step,
            steps_meanwhile_ms=[1e3 * step for step in during],
            lost_ms=1e3 * (pause + sum(during) - len(during) * plain_step),
        )
    return size, digest


def _digest(trainer: Trainer) -> int:
    """A sum over the bits of this rank's parameters and moments."""
    optimizer = trainer.engine.optimizer
    held = (tensor for name in optimizer.parameters for tensor in optimizer.tensors(name))
    return int(sum(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64) for tensor in held))


def _measure_load(trainer: Trainer, folder: Path, size: int, digest: int) -> None:
    """From the page cache, if it holds the files, as it does where they fit into memory."""
    for checksums in (True, False):
        trainer.checkpointer.settings.checksums = checksums
        seconds = _slowest(lambda: trainer.checkpointer.load(Found(folder / "step-1", model_only=False)))
        _report(f"load, checksums {checksums}", seconds=seconds, gb_per_second=size / 1e9 / seconds)
        if _digest(trainer) != digest:
            raise AssertionError("what has been loaded is not what was saved")


def _write_plainly(folder: Path, size: int) -> None:
    """As many bytes as a rank saves, as ``dd conv=fsync`` would, and through torch.save; in the place of the checkpoint."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-1")
    file, block = folder / f"plain-{dist.get_rank()}", torch.ones(BLOCK, dtype=torch.uint8)

    def raw() -> None:
        with file.open("wb", buffering=0) as stream:
            for _ in range(size // BLOCK + 1):
                stream.write(block.numpy().data)
            os.fsync(stream.fileno())

    def by_torch() -> None:
        with file.open("wb") as stream:
            for _ in range(size // BLOCK + 1):
                torch.save(block, stream)
            os.fsync(stream.fileno())

    for name, write in (("write and fsync", raw), ("torch.save and fsync", by_torch)):
        file.unlink(missing_ok=True)
        seconds = _slowest(write)
        _report(name, seconds=seconds, gb_per_second=file.stat().st_size * dist.get_world_size() / 1e9 / seconds)
    file.unlink()


def _slowest(action: Callable) -> float:
    """Seconds that it takes the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _report(name: str, **numbers: Any) -> None:
    def rounded(value: Any) -> Any:
        return [rounded(one) for one in value] if isinstance(value, list) else round(value, 3)

    if dist.get_rank() == 0:
        print(json.dumps({"measured": name} | {key: rounded(value) for key, value in numbers.items()}), flush=True)


if __name__ == "__main__":
    main()
