"""Which dispatcher ``moe.dispatcher = "auto"`` stands for."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallelisms.domains import host


class Place(NamedTuple):
    """Where a rank's GPU is: its host, its number there, and how many NVLinks it has to each GPU of the host."""

    host: str
    gpu: int
    links: list[int]


def choose_dispatcher(group: ProcessGroup | None, dtype: torch.dtype) -> str:
    """Local for a group of one, nvlink for bf16 tokens on GPUs of one NVLink domain, else alltoall. Collective; the same on every
    rank.

    Args:
        group: the ranks of the experts, None for one.
        dtype: of the tokens.
    """
    if group is None:
        return "local"
    if not (torch.cuda.is_available() and dtype == torch.bfloat16):
        return "alltoall"
    return "nvlink" if share_nvlink(_places(group)) else "alltoall"


def share_nvlink(places: list[Place]) -> bool:
    """Whether every two of the GPUs are of one host and have NVLink between them."""
    others = ((a, b) for a in places for b in places if a is not b)
    return all(a.host == b.host and a.gpu != b.gpu and a.links[b.gpu] > 0 for a, b in others)


@cache
def _places(group: ProcessGroup) -> list[Place]:
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, _own_place(), group=group)
    return places


def _own_place() -> Place:
    gpu = torch.cuda.current_device()
    return Place(host(), gpu, _links(gpu))


def _links(gpu: int) -> list[int]:
    """NVLinks from a GPU to each of its host, through switches or not; none where the driver does not tell."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity

    try:
        return _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[gpu]
    except RuntimeError:
        return [0] * torch.cuda.device_count()
