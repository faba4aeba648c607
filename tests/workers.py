"""Runs a function on the ranks of a gloo group, every rank a fresh fork of one process that has imported everything."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PRELOAD = ["torch._dynamo", "layout_runs", "trainer_runs"]


class WorkerError(AssertionError):
    """A rank failed; the message holds the traceback of the first one."""


class Crash(WorkerError):
    """A rank was ended by a signal that it had brought upon itself."""


class WorkerPool:
    """``run(world, fn, *args)`` calls ``fn(*args)`` on every rank of a new process group; returns the results by rank.

    ``fn`` must be importable, and results should hold numpy arrays rather than tensors (which travel as file descriptors).
    """

    def __init__(self) -> None:
        # The fork server takes its module path from the environment.
        os.environ["PYTHONPATH"] = os.pathsep.join((str(TESTS.parent), str(TESTS)))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 100.0, group: bool = True) -> list[Any]:
        """With ``group = False`` the ranks only find in their environment what a launcher puts there.

        gloo's own thread (pt_gloo_runloop) has been seen to crash in malloc, once in some thousand groups (torch 2.13.0): a crash
        is reported as a warning and the run repeated, once. A crash of ours that comes again fails the test.
        """
        try:
            return self._run(world, fn, args, timeout, group)
        except Crash as crash:
            warnings.warn(str(crash), stacklevel=2)
            return self._run(world, fn, args, timeout, group)

    def _run(self, world: int, fn: Callable[..., Any], args: tuple, timeout: float, group: bool) -> list[Any]:
        results: dict[int, Any] = {}
        port = None if group else free_port()
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(world):
                ours, theirs = self.context.Pipe()
                process = self.context.Process(target=_rank, args=(rank, world, folder, port, theirs, fn, args), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            try:
                deadline = time.monotonic() + timeout
                while len(results) < world:
                    waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
                    ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
                    if not ready:
                        raise WorkerError(f"of {world} ranks only {sorted(results)} answered within {timeout} s")
                    for pipe in ready:
                        ok, value = _answer(pipe, processes[pipes.index(pipe)])
                        if not ok:
                            raise WorkerError(value)
                        results[pipes.index(pipe)] = value
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        return [results[rank] for rank in range(world)]


def _answer(pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        kind = Crash if process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT) else WorkerError
        raise kind(f"{process.name} ended without an answer, exit code {process.exitcode}; see its stderr") from None


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def _rank(rank: int, world: int, folder: str, port: int | None, pipe: Connection, fn: Callable[..., Any], args: tuple) -> None:
    import faulthandler
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        if port is None:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        else:
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
        answer = (True, fn(*args))
    except BaseException:  # pytest's own failures are no Exceptions
        answer = (False, f"rank {rank} of {world}:\n{traceback.format_exc()}")
    pipe.send(answer)
    pipe.recv()  # Stays until the others are done: some of them may still be reading from this rank.
