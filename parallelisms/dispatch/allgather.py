"""All-gather dispatch: every rank sees every token of the group and keeps the rows of its own experts.

It moves each token to every rank of the group, whether or not an expert of the token is there, and needs no split sizes.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import TokenGradients, unpermute
from kernels.sort import sort_pairs
from parallelisms.dispatch.base import Meanwhile
from parallelisms.routing import RoutedTokens, Routing


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum in at least fp32, so that partial sums of a token's experts do not round between ranks."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    out = wide.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, wide, group=group)
    return out.to(x.dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather(grad, ctx.group), None


class AllGatherDispatcher:
    """G tokens are gathered from the group. One host sync a layer, for the number of rows to allocate."""

    def __init__(self, num_experts: int, group: ProcessGroup, ep: int, etp: int):
        self.group = group
        self.num_local = num_experts // ep
        self.first_expert = group.rank() // etp * self.num_local

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> tuple[RoutedTokens, RoutedTokens]:
        x_GD = _AllGather.apply(x_TD, self.group)
        weights_GK = _AllGather.apply(routing.topk_weights_TK, self.group)
        local_GK = _all_gather(routing.topk_experts_TK, self.group) - self.first_expert
        is_local_GK = (local_GK >= 0) & (local_GK < self.num_local)
        key_P = torch.where(is_local_GK, local_GK, self.num_local).flatten()
        pair_P, row_P, counts_e, offsets_e = sort_pairs(key_P, self.num_local)
        pair_R = pair_P[: int(counts_e.sum())]
        routed = RoutedTokens(x_GD, weights_GK.flatten(), pair_R, row_P.view_as(local_GK), offsets_e)
        return routed, routed

    def even_rows(self, choices: int) -> None:
        return None

    def combine(self, rows_RD: Tensor, handle: RoutedTokens, grads: TokenGradients | None = None) -> Tensor:
        # Each rank's share of a token's sum travels in fp32 and is rounded once, with the others'.
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        partial_GD = unpermute(rows_RD.to(wide), handle.row_NK)
        return _ReduceScatter.apply(partial_GD, self.group).to(rows_RD.dtype)
