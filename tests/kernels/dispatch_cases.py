"""Runs the transfers of :mod:`kernels.dispatch` between forked processes that share memory; prints what went wrong as JSON.

Usage: dispatch_cases.py (kernels | reference). With "kernels" the Triton kernels run in Triton's interpreter, which must be
chosen before Triton is imported; the signals are real ones between processes either way.
"""

import json
import multiprocessing
import os
import queue
import sys
import time
import traceback
from itertools import chain

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from transfer_cases import Case, Received, allocator, expect, judge, make_round, shapes, steps

from kernels import dispatch, dispatch_kernels
from kernels.peers import Exchange, PeerError, TransferShape

CPU = torch.device("cpu")
SECONDS = 600
"""For a case's ranks, which poll and take the time from each other: 70 were seen where thirty processes shared two cores."""


KERNEL_CASES = [
    Case(2, 1, (37, 30), 40, 2, 4),
    Case(2, 1, (5, 9), 1100, 3, 8, hot=True),
    Case(1, 2, (12, 20), 33, 1, 3, dtype=torch.bfloat16),
    Case(4, 1, (3, 70, 0, 11), 24, 2, 4, programs=2),
    Case(8, 1, (6,) * 8, 12, 2, 16, programs=2, dtype=torch.bfloat16),
]
REFERENCE_CASES = [
    *KERNEL_CASES,
    Case(2, 1, (70, 0), 17, 3, 6, programs=2, dtype=torch.bfloat16),
    Case(2, 2, (9, 9, 9, 9), 16, 3, 6, dtype=torch.bfloat16),
    Case(3, 1, (4, 5, 6), 8, 2, 6, drop=1),
    Case(8, 1, (40,) * 8, 12, 3, 16, programs=6, hot=True),
]


def run_rank(case: Case, rank: int, memories: list[Tensor], use_kernels: bool) -> list[str]:
    """All transfers one right after the other, then all comparisons.

    The first rank is slow between waiting and reading: the other ranks would overwrite what it reads.
    """
    exchange = make_exchange(case, rank, memories, timeout=0.1 if use_kernels else 60.0)
    peers = [exchange.peers(shape, CPU) for shape in shapes(case)]
    ops = tuple(
        getattr(dispatch, f"_launch_{name}" if use_kernels else f"{name}_reference")
        for name in ("push_tokens", "push_rows", "push_sums")
    )
    if rank == 0:
        slow_down(dispatch_kernels, "_wait") if use_kernels else slow_down(dispatch, "_wait_reference")
    rounds = [make_round(case, number) for number in range(2 if use_kernels else 6)]
    expected = [expect(case, inputs, rank) for inputs in rounds]
    received = [
        Received(*(step() for step in steps(ops, exchange, peers, case, *each))) for each in zip(rounds, expected, strict=True)
    ]
    return [
        f"{case}, rank {rank}, round {number}: {what}"
        for number, wanted in enumerate(expected)
        for what, right in judge(case, received[number], wanted).items()
        if not right
    ]


def slow_down(module, name: str) -> None:
    function = getattr(module, name)

    def slow(*args, **kwargs) -> None:
        function(*args, **kwargs)
        time.sleep(0.003)

    setattr(module, name, slow)


def make_exchange(case: Case, rank: int, memories: list[Tensor], timeout: float) -> Exchange:
    """The interpreter has no clock: kernels take a nanosecond for a poll."""
    names = [f"rank {rank}" for rank in range(case.world)]
    return Exchange(rank, case.world, case.max_tokens, case.programs, allocator(memories), names, timeout)


def run_alone(case: Case, rank: int, memories: list[Tensor], use_kernels: bool) -> list[str]:
    """The second rank never comes; the first says so and does not wait again."""
    if rank == 1:
        return []
    exchange, inputs = make_exchange(case, rank, memories, timeout=1e-7 if use_kernels else 0.1), make_round(case, 0)
    push = dispatch._launch_push_tokens if use_kernels else dispatch.push_tokens_reference
    try:
        for _ in range(2):
            peers = exchange.peers(TransferShape(case.D, case.K, case.dtype), CPU)
            push(exchange, peers, inputs.x[rank], inputs.experts[rank], inputs.weights[rank], case.num_local, 1)
    except PeerError as error:
        return [] if "rank 1 did not take part" in str(error) else [str(error)]
    return [f"{case}, rank {rank}: no error"]


def run_case(case: Case, work, seconds: float = SECONDS) -> list[str]:
    """One process for each rank, forked so that shared memory has the same address in all of them. They end with this one."""
    context = multiprocessing.get_context("fork")
    memories = [torch.zeros(1 << 22, dtype=torch.uint8).share_memory_() for _ in range(case.world)]
    results = context.Queue()

    def child(rank: int) -> None:
        try:
            results.put((rank, work(case, rank, memories)))
        except BaseException:
            results.put((rank, [f"{case}, rank {rank}: {traceback.format_exc()}"]))

    processes = [context.Process(target=child, args=(rank,), daemon=True) for rank in range(case.world)]
    for process in processes:
        process.start()
    answers: dict[int, list[str]] = {}
    deadline = time.monotonic() + seconds
    try:
        while len(answers) < case.world:
            rank, lines = results.get(timeout=max(deadline - time.monotonic(), 0))
            answers[rank] = lines
    except queue.Empty:
        return [f"{case}: only ranks {sorted(answers)} answered within {seconds} s", *chain(*answers.values())]
    for process in processes:
        process.join()
    return [*chain(*answers.values())]


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_kernels = sys.argv[1] == "kernels"
    cases = KERNEL_CASES if use_kernels else REFERENCE_CASES
    report = {str(case): run_case(case, lambda *at: run_rank(*at, use_kernels)) for case in cases}
    report["missing rank"] = run_case(cases[0], lambda *at: run_alone(*at, use_kernels))
    print(json.dumps(report))
