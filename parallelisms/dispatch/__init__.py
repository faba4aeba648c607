"""Expert dispatchers: tokens to the ranks of their experts and back, behind one interface."""

import torch
from torch.distributed import ProcessGroup

from parallelisms.dispatch.allgather import AllGatherDispatcher
from parallelisms.dispatch.alltoall import AllToAllDispatcher
from parallelisms.dispatch.base import Dispatcher
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.dispatch.choice import choose_dispatcher
from parallelisms.dispatch.deepep import DeepEPDispatcher
from parallelisms.dispatch.hybridep import HybridEPDispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.dispatch.nvlink import NvlinkDispatcher

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
    """
    if kind == "auto":
        kind = choose_dispatcher(group, dtype)
    match kind:
        case "local":
            return LocalDispatcher()
        case "nvlink":
            return NvlinkDispatcher(num_experts, group, ep, etp, max_tokens, sms, capacity)
        case "deepep":
            return DeepEPDispatcher(num_experts, group, sms)
        case "hybridep":
            return HybridEPDispatcher(num_experts, group, max_tokens, sms)
    return {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}[kind](num_experts, group, ep, etp)
