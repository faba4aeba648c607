"""Which ranks of an expert group are near each other: those of a domain, which is a host unless told otherwise."""

import socket
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup


class Domains(NamedTuple):
    """A group of ranks as domains of equally many consecutive ranks: ``between`` are the ranks that have this rank's place in
    their domain, ``within`` those of its own."""

    between: ProcessGroup
    within: ProcessGroup


def domain_size(ep: int, etp: int, wanted: int | None) -> int | None:
    """Ranks of a domain, or None where a group of ep x etp ranks, etp varying fastest, is no two domains of two ranks or more.

    Nor is it where a domain would hold a part of an expert's etp ranks and other experts too. Collective over all ranks.

    Args:
        wanted: ranks of a domain; None for those of a host.
    """
    size = ranks_of_host() if wanted is None else wanted
    fits = ep * etp % size == 0 and (etp % size == 0 or size % etp == 0)
    return size if fits and 1 < size < ep * etp else None


@cache
def ranks_of_host() -> int:
    """Consecutive ranks that share a host, 1 where hosts have unequal numbers or other ranks in between."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host())
    size = hosts.count(hosts[0])
    if len(hosts) % size:
        return 1
    return size if all(len(set(hosts[first : first + size])) == 1 for first in range(0, len(hosts), size)) else 1


def host() -> str:
    """A name of this machine. Containers of one machine share its boot, and machines may share a name."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
