"""Ranks as threads over one store, and a run of two processes of which one is stopped."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from workers import free_port

from moe_titan.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parents[2]

PERIOD, TIMEOUT = 0.02, 0.6


class Ranks:
    def __init__(self, world: int):
        self.messages: dict[int, str] = {}
        store = dist.HashStore()
        self.beats = [
            Heartbeat(store, rank, world, TIMEOUT, PERIOD, lambda message, rank=rank: self.messages.setdefault(rank, message))
            for rank in range(world)
        ]

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.messages) < count and time.monotonic() < deadline:
            time.sleep(PERIOD)

    def close(self) -> None:
        for beat in self.beats:
            beat.close()

    def stop(self, rank: int) -> None:
        """As a rank stops that is killed: it says nothing."""
        self.beats[rank]._store = _Silent()


class _Silent:
    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        return False


class _Broken(_Silent):
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection refused")


@pytest.fixture
def start():
    with ExitStack() as stack:

        def start(world: int) -> Ranks:
            ranks = Ranks(world)
            stack.callback(ranks.close)
            return ranks

        yield start


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_rank_that_dies_is_named_by_all_others(start, world):
    ranks = start(world)
    time.sleep(10 * PERIOD)
    assert not ranks.messages
    ranks.stop(1)
    ranks.wait_for(world)
    others = {rank: message for rank, message in ranks.messages.items() if rank != 1}
    assert sorted(others) == [rank for rank in range(world) if rank != 1]
    assert all("rank 1 has given no sign of life for 0." in message for message in others.values())


def test_ranks_that_live_or_are_done_are_not_given_up(start):
    ranks = start(3)
    ranks.beats[1].close()
    time.sleep(2 * TIMEOUT)
    assert not ranks.messages


def test_a_longer_timeout_holds_from_when_it_is_set(start):
    ranks = start(2)
    for beat in ranks.beats:
        beat.timeout = 60
    ranks.stop(1)
    time.sleep(2 * TIMEOUT)
    assert not ranks.messages


def test_a_lost_store_ends_the_rank_unless_the_run_ends_meanwhile(start):
    ranks = start(3)
    ranks.beats[1]._store = _Broken()
    ranks.beats[2]._store = _Broken()
    time.sleep(5 * PERIOD)
    ranks.beats[2].close()
    ranks.wait_for(2)  # rank 0 misses rank 1
    assert "rank 1 lost the store" in ranks.messages[1] and "connection refused" in ranks.messages[1]
    assert 2 not in ranks.messages


def test_one_rank_has_nobody_to_watch():
    Heartbeat(dist.HashStore(), 0, 1, TIMEOUT).close()


def test_a_run_names_the_rank_that_hangs(tmp_path):
    flags = {
        "training.steps": 100_000,
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.expert_parallel_degree": 2,
        "checkpoint.enable": "false",
        "comm.train_timeout_seconds": 14,
        "job.dump_folder": tmp_path / "run",
    }
    command = [sys.executable, "train.py", "--config", "train_configs/debug.toml"]
    command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        runs, logs = [], [tmp_path / f"rank{rank}.txt" for rank in range(2)]
        for rank, log in enumerate(logs):
            environment = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = stack.enter_context(log.open("w"))
            run = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(run.wait)
            stack.callback(run.kill)
            runs.append(run)
        deadline = time.monotonic() + 120
        while "I step 5 " not in logs[0].read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        runs[1].send_signal(signal.SIGSTOP)
        assert runs[0].wait(60) == 1
        assert "rank 1 has given no sign of life for 10 s" in logs[0].read_text()
