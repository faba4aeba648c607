"""Two processes with a GPU each."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def join_group(rank: int, folder: str) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)


def run_ranks(function: Callable, folder: Path, seconds: float) -> list[int | None]:
    """Exit codes of the ranks after at most so long; None for one that still ran."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=function, args=(rank, str(folder))) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes
