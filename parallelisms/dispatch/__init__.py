"""Expert dispatchers: tokens to the ranks of their experts and back, behind one interface."""

import torch
from torch.distributed import ProcessGroup

from parallelisms.dispatch.allgather import AllGatherDispatcher
from parallelisms.dispatch.alltoall import AllToAllDispatcher, Hop, hops_over
from parallelisms.dispatch.base import Dispatcher
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.dispatch.choice import choose_dispatcher
from parallelisms.dispatch.deepep import DeepEPDispatcher
from parallelisms.dispatch.hybridep import HybridEPDispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.dispatch.nvlink import NvlinkDispatcher
from parallelisms.domains import Domains

__all__ = ["Dispatcher", "build_dispatcher"]


def build_dispatcher(
    kind: str,
    num_experts: int,
    group: ProcessGroup | None,
    ep: int,
    etp: int,
    max_tokens: int = 0,
    sms: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    capacity: RowCapacity | None = None,
    domains: Domains | None = None,
) -> Dispatcher:
    """The dispatcher of one MoE layer.

    Args:
        kind: "auto" (see :func:`choose_dispatcher`), "local", "allgather", "alltoall", "nvlink", or "deepep" and "hybridep",
            whose packages must be installed.
        group: the ep x etp ranks, etp varying fastest; None when ep * etp is 1.
        max_tokens: the most tokens that a rank brings to a layer, for those that make buffers for so many: nvlink and hybridep.
        sms: multiprocessors that a transfer of deepep or hybridep takes at most; one of nvlink has as many programs as fit on
            so many. None: as each is fastest, or says itself.
        dtype: of the tokens, by which auto chooses.
        capacity: a bound on the rows of nvlink's experts.
        domains: of the group, if it spans several: alltoall and nvlink then send a token once to each, and pass it on there.
    """
    if kind == "auto":
        kind = choose_dispatcher(group, dtype)
    match kind:
        case "local":
            return LocalDispatcher()
        case "allgather":
            return AllGatherDispatcher(num_experts, group, ep, etp)
        case "deepep":
            return DeepEPDispatcher(num_experts, group, sms)
        case "hybridep":
            return HybridEPDispatcher(num_experts, group, max_tokens, sms)
    if domains is None:
        if kind == "nvlink":
            return NvlinkDispatcher(num_experts, group, ep, etp, max_tokens, sms, capacity)
        return AllToAllDispatcher([Hop(num_experts, group, ep, etp)])
    between, within = hops_over(num_experts, domains, ep, etp)
    if kind == "alltoall":
        return AllToAllDispatcher([between, within])
    # All that the domains' ranks of one place have may come to one rank. Loads are even over all ranks.
    most = between.group.size() * max_tokens
    return AllToAllDispatcher([between], NvlinkDispatcher(num_experts, within.group, ep, within.etp, most, sms, capacity))
