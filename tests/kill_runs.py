"""Kills a random rank of a run at a random moment of saving, again and again, and starts it with the same command each time.

By hand: ``PYTHONPATH=. python tests/kill_runs.py --kills 50``.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import trainer_runs
from trainer_runs import MODELS, arguments, layout
from workers import WorkerPool, free_port

from moe_titan.checkpoint import complete_steps
from moe_titan.inputs import read_inputs
from moe_titan.interchange.manifest import FileSum, checksum
from moe_titan.trainer import Trainer

WORLD = 2
LAYOUT = layout(dps=2, ep=2)
ENDLESS = {"training.steps": 1_000_000, "checkpoint.interval": 1, "checkpoint.keep_latest_k": 3}
LONGEST_DELAY = 0.02
"""Seconds from the first sight of a save to the kill; about as long as a save takes."""


@dataclass
class Report:
    """``starts``: newest complete step after each kill, and the one at which the run then started. ``torn``: kills that left a
    save half done. ``sums``: of the files of the newest complete steps."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    torn: int = 0
    sums: dict[int, dict[str, FileSum]] = field(default_factory=dict)


def kill_again_and_again(pool: WorkerPool, corpus: Path, folder: Path, mode: str, kills: int, seed: int) -> Report:
    """``kills`` kills of one run on two ranks, whose every step is saved, and a start after each."""
    chance, report = random.Random(seed), Report()
    argv = arguments(corpus, folder, MODELS["deepseek"], LAYOUT, ENDLESS, {"checkpoint.async_mode": mode})
    checkpoints, newest = folder / "checkpoint", 0
    for kill in range(kills + 1):
        started = folder / f"started-{kill}"
        ranks = _start(pool, argv, started)
        _wait(lambda at=newest: max(complete_steps(checkpoints), default=0) >= at + 1, ranks)
        if kill:
            report.starts.append((newest, int(started.read_text())))
        if kill < kills:
            _wait(lambda: any(checkpoints.glob(".saving-*")), ranks)
            time.sleep(chance.uniform(0, LONGEST_DELAY))
        _end(ranks, chance.choice(ranks))
        if kill == kills:
            break
        newest = max(complete_steps(checkpoints))
        report.torn += any(checkpoints.glob(".saving-*"))
        report.sums[newest] = sums(checkpoints / f"step-{newest}")
    return report


def uninterrupted(pool: WorkerPool, corpus: Path, folder: Path, steps: set[int]) -> dict[int, dict[str, FileSum]]:
    """Sums of the files of these steps, from a run that nothing disturbs."""
    settings = {
        "training.steps": max(steps),
        "lr_scheduler.total_steps": ENDLESS["training.steps"],
        "checkpoint.keep_latest_k": 0,
    }
    argv = arguments(corpus, folder, MODELS["deepseek"], LAYOUT, ENDLESS, settings)
    pool.run(WORLD, trainer_runs.main, argv, group=False, timeout=1000)
    return {step: sums(folder / "checkpoint" / f"step-{step}") for step in steps}


def sums(step: Path) -> dict[str, FileSum]:
    return {file.name: checksum(file) for file in step.glob("*.distcp")}


def _start(pool: WorkerPool, argv: list[str], started: Path) -> list[BaseProcess]:
    port = free_port()
    ranks = [pool.context.Process(target=_train, args=(rank, port, argv, started), daemon=True) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    return ranks


def _end(ranks: list[BaseProcess], first: BaseProcess) -> None:
    first.kill()
    for rank in ranks:
        rank.join(2)  # The others notice, as far as they can.
        rank.kill()
        rank.join()


def _train(rank: int, port: int, argv: list[str], started: Path) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The tracebacks of those who miss the killed one.
    trainer = Trainer(read_inputs(argv, WORLD))
    if rank == 0:
        started.write_text(str(trainer.step))
    trainer.train()


def _wait(condition: Callable[[], bool], ranks: list[BaseProcess], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(rank.is_alive() for rank in ranks), "a rank has ended by itself"
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool = WorkerPool()
    with tempfile.TemporaryDirectory() as parent:
        corpus = trainer_runs.write_corpus(Path(parent, "corpus"))
        for number, mode in enumerate(("disabled", "async")):
            kills = options.kills // 2 + (options.kills % 2) * number
            report = kill_again_and_again(pool, corpus, Path(parent, mode), mode, kills, options.seed)
            expected = uninterrupted(pool, corpus, Path(parent, f"{mode} straight"), set(report.sums))
            equal = sum(report.sums[step] == expected[step] for step in report.sums)
            right = sum(newest == start for newest, start in report.starts)
            print(
                f"async_mode {mode}: {kills} kills, {report.torn} within a save; {right} of {len(report.starts)} restarts from "
                f"the newest complete step; {equal} of {len(report.sums)} newest steps equal an uninterrupted run's bit by bit; "
                f"last step {max(report.sums)}"
            )


if __name__ == "__main__":
    main()
