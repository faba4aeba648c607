"""Expert dispatchers: tokens to the ranks of their experts and back, behind one interface."""

from torch.distributed import ProcessGroup

from parallelisms.dispatch.allgather import AllGatherDispatcher
from parallelisms.dispatch.alltoall import AllToAllDispatcher
from parallelisms.dispatch.base import Dispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.dispatch.nvlink import NvlinkDispatcher

__all__ = ["Dispatcher", "build_dispatcher"]


def build_dispatcher(
    kind: str, num_experts: int, group: ProcessGroup | None, ep: int, etp: int, max_tokens: int = 0, programs: int = 64
) -> Dispatcher:
    """The dispatcher of one MoE layer.

    Args:
        kind: "auto", "local", "allgather", "alltoall" or "nvlink"; "auto" is local for a group of one, else alltoall.
        group: the ep x etp ranks, etp varying fastest; None when ep * etp is 1.
        max_tokens: the most tokens that a rank brings to a layer; of interest to nvlink, whose buffers are made for it.
        programs: of interest to nvlink, too; see :class:`parallelisms.dispatch.nvlink.NvlinkDispatcher`.
    """
    if kind == "auto":
        kind = "local" if ep * etp == 1 else "alltoall"
    if kind == "local":
        return LocalDispatcher()
    if kind == "nvlink":
        return NvlinkDispatcher(num_experts, group, ep, etp, max_tokens, programs)
    return {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}[kind](num_experts, group, ep, etp)
