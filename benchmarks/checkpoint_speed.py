"""Speed of saving and loading beside plain writes to the same disk, and the pause that a save puts on training.

torchrun --standalone --nproc-per-node N benchmarks/checkpoint_speed.py [--modes MODE ...] --config FILE.toml [...]

Takes train.py's arguments; the checkpoints go to job.dump_folder, on the disk to be measured, one at a time. Rank 0 prints one
line of JSON per measurement; rates are of all ranks together, times those of the slowest.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
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
PROGRESS = Progress(1, 1, 1)
MODES = ("disabled", "async", "async_with_pinned_mem")
SETTINGS = ["--checkpoint.enable=true", "--checkpoint.interval=1000000", "--checkpoint.keep_latest_k=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES, help="of checkpoint.async_mode, in this order")
    parser.add_argument("--rounds", type=int, default=3, help="of saving and loading beside plain files; the fastest counts")
    options, argv = parser.parse_known_args()
    trainer = Trainer(read_inputs([*argv, *SETTINGS], int(os.environ.get("WORLD_SIZE", "1"))))
    folder = Path(trainer.config.job.dump_folder, "checkpoint")
    gc.disable()  # as the trainer does
    if options.modes:
        _steps(trainer)  # compiles
        plain_step = statistics.median(_steps(trainer))
    for mode in options.modes:
        _measure_saves(trainer, mode, folder, plain_step)
    _measure_disk(trainer, folder, options.rounds)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    trainer.close()


def _steps(trainer: Trainer, number: int = STEPS) -> list[float]:
    """Seconds of each step."""
    return [_slowest(lambda: trainer.engine.step(trainer.data.next_step(), 1e-5).wait()) for _ in range(number)]


def _set_mode(trainer: Trainer, mode: str) -> Checkpointer:
    trainer.config.checkpoint.async_mode = mode
    trainer.checkpointer = Checkpointer(trainer.config, trainer.engine, trainer.data)
    return trainer.checkpointer


def _measure_saves(trainer: Trainer, mode: str, folder: Path, plain_step: float) -> None:
    """A first save in this mode, and a second, for which memory and process group are there already, and loading that."""
    checkpointer = _set_mode(trainer, mode)
    saver = checkpointer._saver
    for what in ("first", "second"):
        _clear(folder)
        digest, begin = _digest(trainer), time.perf_counter()
        pause = _slowest(lambda: checkpointer.save(PROGRESS, next_lr=1e-5, wait=False))
        during: list[float] = []
        while checkpointer._requests.agree(saver.writing).writing:
            during += _steps(trainer, 1)
        saver.settle()
        seconds, size = time.perf_counter() - begin, _size(folder)
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
    _steps(trainer, 1)
    _load(trainer, folder, digest, checksums=False)


def _measure_disk(trainer: Trainer, folder: Path, rounds: int) -> None:
    """Saving and loading beside as many bytes in a plain file of each rank, in turns: what else the disk does troubles all alike.

    Whatever is read lies on the disk alone, where the system lets go of its copy in memory.
    """
    checkpointer = _set_mode(trainer, "disabled")
    plain = folder / f"plain-{dist.get_rank()}"
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        _clear(folder)
        digest = _digest(trainer)
        seconds["save"].append(_slowest(lambda: checkpointer.save(PROGRESS, next_lr=1e-5)))
        size = _size(folder)
        _steps(trainer, 1)  # changes what is to be loaded
        for checksums in (True, False):
            _forget(folder)
            seconds[f"load, checksums {checksums}"].append(_load(trainer, folder, digest, checksums))
        _clear(folder)
        for name, write, read in (("plain file", _write, _read), ("torch.save", _torch_save, _torch_load)):
            seconds[f"{name}, written"].append(_slowest(partial(write, plain, size // dist.get_world_size() // BLOCK + 1)))
            _forget(folder)
            seconds[f"{name}, read"].append(_slowest(partial(read, plain)))
            plain.unlink()
    for name, every in seconds.items():
        best, direction = min(every), "written" if name == "save" else "read"
        shares = {
            f"share_of_{peer.replace(' ', '_')}": min(seconds[f"{peer}, {direction}"]) / best
            for peer in ("plain file", "torch.save")
            if name.startswith(("save", "load"))
        }
        _report(name, seconds=best, every=every, gb_per_second=size / 1e9 / best, **shares)


def _load(trainer: Trainer, folder: Path, digest: int, checksums: bool) -> float:
    """Seconds."""
    trainer.checkpointer.settings.checksums = checksums
    seconds = _slowest(lambda: trainer.checkpointer.load(Found(folder / "step-1", model_only=False)))
    trainer.checkpointer.settings.checksums = True
    if _digest(trainer) != digest:
        raise AssertionError("what has been loaded is not what was saved")
    return seconds


def _write(file: Path, blocks: int) -> None:
    """As ``dd conv=fsync`` does."""
    block = torch.ones(BLOCK, dtype=torch.uint8).numpy().data
    with file.open("wb", buffering=0) as stream:
        for _ in range(blocks):
            stream.write(block)
        os.fsync(stream.fileno())


def _read(file: Path) -> None:
    block = memoryview(bytearray(BLOCK))
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass


def _torch_save(file: Path, blocks: int) -> None:
    block = torch.ones(BLOCK, dtype=torch.uint8)
    with file.open("wb") as stream:
        torch.save([block.clone() for _ in range(blocks)], stream)
        os.fsync(stream.fileno())


def _torch_load(file: Path) -> None:
    torch.load(file, weights_only=True)


def _forget(folder: Path) -> None:
    """Has the system drop its copies of the files."""
    dist.barrier()
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _clear(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-1", ignore_errors=True)
    dist.barrier()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "step-1").iterdir())


def _digest(trainer: Trainer) -> int:
    """A sum over the bits of this rank's parameters and moments."""
    optimizer = trainer.engine.optimizer
    held = (tensor for name in optimizer.parameters for tensor in optimizer.tensors(name))
    return int(sum(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64) for tensor in held))


def _slowest(action: Callable) -> float:
    """Seconds that the host of the slowest rank is busy with it: of a save the pause, while the GPU may go on copying."""
    dist.barrier()
    begin = time.perf_counter()
    action()
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
