"""What the ranks of one run measure together: they begin at the same time, and the slowest one counts."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def missing(script: str) -> str | None:
    """Why a script that needs a GPU for each of several ranks cannot run here."""
    gpus, world = torch.cuda.device_count(), int(os.environ.get("WORLD_SIZE", "1"))
    if gpus >= 2 and world >= 2:
        return None
    cure = f"run torchrun --nproc-per-node 2 {script} on a machine with NVLink"
    return f"{script} measures what happens between GPUs, and finds {gpus} GPUs and {world} processes: {cure}"


def join() -> None:
    """Makes all processes that torchrun started one group, each with its own GPU; without multicast over NVLink. A rank that
    stays away for two minutes ends the run."""
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=2), device_id=device)


def slowest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(run: Callable[[], object], calls: int, repeats: int = 7) -> float:
    """us of one of the ``calls`` calls that ``run`` makes: median over the repeats of the slowest rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(slowest(start.elapsed_time(end) * 1e3 / calls))
    return sorted(times)[repeats // 2]


def eager(call: Callable[[], object], calls: int = 5) -> float:
    for _ in range(3):
        call()
    return timed(lambda: [call() for _ in range(calls)], calls)


def graphed(call: Callable[[], object], calls: int = 10) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return timed(graph.replay, calls)
