"""A pool of gloo processes that is started once and runs functions on worlds of any size up to its own."""

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

WORLD = 8


class WorkerError(AssertionError):
    """A rank failed; the message holds its traceback."""


class WorkerPool:
    """``run(world, fn, *args)`` calls ``fn(*args)`` on ranks 0 .. world - 1 of a fresh process group; returns their results by rank."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.close)

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:world]:
                pipe.send((world, os.path.join(folder, "store"), fn, args))
            results, errors = [], []
            for rank, pipe in enumerate(self.pipes[:world]):
                if not pipe.poll(timeout):
                    raise WorkerError(f"rank {rank} of {world} gave no answer within {timeout} s: {errors}")
                ok, value = pipe.recv()
                (results if ok else errors).append(value)
        if errors:
            raise WorkerError("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def _serve(rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        world, store, fn, args = pipe.recv()
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
            answer = (True, fn(*args))
        except Exception:
            answer = (False, f"rank {rank} of {world}:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
