"""Speed of saving and loading beside plain writes to the same disk, and the pause that a save in the background puts on a step.

torchrun --standalone --nproc-per-node N benchmarks/checkpoint_speed.py --config FILE.toml [--section.key value ...]

Takes train.py's arguments; the checkpoints go to job.dump_folder, on the disk to be measured. Rank 0 prints one line of JSON
per measurement; rates are of all ranks together, seconds those of the slowest.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist

from moe_titan.checkpoint import Checkpointer, Found, Progress
from moe_titan.inputs import read_inputs
from moe_titan.trainer import Trainer

STEPS = 8
BLOCK = 1 << 24
MODES = ("async", "async_with_pinned_mem")
SETTINGS = ["--checkpoint.enable=true", "--checkpoint.interval=1000000", "--checkpoint.keep_latest_k=0"]


def main() -> None:
    trainer = Trainer(read_inputs([*sys.argv[1:], *SETTINGS], int(os.environ.get("WORLD_SIZE", "1"))))
    folder = Path(trainer.config.job.dump_folder, "checkpoint")
    _steps(trainer, STEPS)  # compiles
    plain_step = _steps(trainer, STEPS)
    _save(trainer, 1, wait=True)  # makes the process group
    seconds = _slowest(lambda: _save(trainer, 2, wait=True))
    size = sum(file.stat().st_size for file in (folder / "step-2").iterdir())
    _report("plain step", seconds=plain_step)
    _report("save", seconds=seconds, gb=size / 1e9, gb_per_second=size / 1e9 / seconds)
    _write_plainly(folder, size // dist.get_world_size())
    _load(trainer, folder / "step-2", size)
    for mode in MODES:
        _save_in_background(trainer, mode, plain_step)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    trainer.close()


def _steps(trainer: Trainer, number: int) -> float:
    """Median seconds of a step."""
    return statistics.median(_slowest(lambda: trainer.engine.step(trainer.data.next_step(), 1e-5)) for _ in range(number))


def _save(trainer: Trainer, step: int, wait: bool) -> None:
    trainer.checkpointer.save(Progress(step, step, step), next_lr=1e-5, wait=wait)


def _write_plainly(folder: Path, size: int) -> None:
    """As many bytes as a rank saves, as ``dd conv=fsync`` would, and through torch.save."""
    file, block = folder / f"plain-{dist.get_rank()}", torch.ones(BLOCK, dtype=torch.uint8)

    def raw() -> None:
        with file.open("wb", buffering=0) as stream:
            for _ in range(size // BLOCK + 1):
                stream.write(block.numpy().data)
            os.fsync(stream.fileno())

    def by_torch() -> None:
        with file.open("wb") as stream:
            torch.save([block.clone() for _ in range(size // BLOCK + 1)], stream)
            os.fsync(stream.fileno())

    for name, write in (("write and fsync", raw), ("torch.save and fsync", by_torch)):
        seconds = _slowest(write)
        _report(name, seconds=seconds, gb_per_second=file.stat().st_size * dist.get_world_size() / 1e9 / seconds)
    file.unlink()


def _load(trainer: Trainer, path: Path, size: int) -> None:
    """From the page cache, if it holds the files, as it does where they fit into memory."""
    for checksums in (True, False):
        trainer.checkpointer.settings.checksums = checksums
        seconds = _slowest(lambda: trainer.checkpointer.load(Found(path, model_only=False)))
        _report(f"load, checksums {checksums}", seconds=seconds, gb_per_second=size / 1e9 / seconds)


def _save_in_background(trainer: Trainer, mode: str, plain_step: float) -> None:
    trainer.config.checkpoint.async_mode = mode
    trainer.checkpointer = Checkpointer(trainer.config, trainer.engine, trainer.data)
    saver = trainer.checkpointer._saver
    for step, what in enumerate(("first", "second"), start=10):
        pause = _slowest(lambda step=step: _save(trainer, step, wait=False))
        begin, during = time.perf_counter(), []
        while trainer.checkpointer._requests.agree(saver.writing).writing:
            during.append(_steps(trainer, 1))
        writing = time.perf_counter() - begin
        saver.settle()
        lost = sum(during) - len(during) * plain_step
        _report(f"{mode}, {what}", pause=pause, writing=writing, steps_meanwhile=len(during), seconds_lost_in_them=lost)


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


def _report(name: str, **numbers: float) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"measured": name} | {key: round(value, 4) for key, value in numbers.items()}), flush=True)


if __name__ == "__main__":
    main()
