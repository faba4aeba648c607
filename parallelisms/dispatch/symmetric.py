"""Memory that all ranks of a group reach: over NVLink on GPUs, in shared memory between the processes of a CPU run."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.peers import Allocate, Exchange, register


@cache
def open_exchange(group: ProcessGroup, max_tokens: int, programs: int) -> str:
    """The name under which :mod:`kernels.dispatch` knows the exchange of a group: one for all layers."""
    ranks = dist.get_process_group_ranks(group)
    name = f"{group.group_name} of ranks {ranks}: {max_tokens} tokens, {programs} programs"
    names = [f"rank {rank}" for rank in ranks]
    register(name, Exchange(group.rank(), group.size(), max_tokens, programs, _allocator(group), names))
    return name


def _allocator(group: ProcessGroup) -> Allocate:
    owners: list[Any] = []

    def allocate(nbytes: int, device: torch.device) -> list[Tensor]:
        return _on_gpus(nbytes, device, group, owners) if device.type == "cuda" else _between_processes(nbytes, group)

    return allocate


def _on_gpus(nbytes: int, device: torch.device, group: ProcessGroup, owners: list[Any]) -> list[Tensor]:
    """Adds to ``owners`` what must live as long as the memory: the returned tensors only point to it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    try:
        handle = symmetric_memory.rendezvous(own, group)
    except RuntimeError as error:
        error.add_note('moe.dispatcher = "nvlink" needs ranks whose GPUs reach each other over NVLink; use "alltoall" elsewhere')
        raise
    owners += [own, handle]
    memories = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
    torch.cuda.synchronize(device)
    dist.barrier(group=group, device_ids=[device.index])
    return memories


def _between_processes(nbytes: int, group: ProcessGroup) -> list[Tensor]:
    folder = [tempfile.mkdtemp(prefix="moe_titan_") if group.rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=dist.get_global_rank(group, 0), group=group)
    paths = [Path(folder[0]) / str(rank) for rank in range(group.size())]
    with paths[group.rank()].open("wb") as file:
        file.truncate(nbytes)
    dist.barrier(group=group)
    memories = [torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
    dist.barrier(group=group)
    paths[group.rank()].unlink()
    dist.barrier(group=group)
    if group.rank() == 0:
        Path(folder[0]).rmdir()
    return memories
