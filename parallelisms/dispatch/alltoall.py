"""All-to-all dispatch over NCCL or gloo: a row travels once to each rank that holds a shard of its expert.

Expert tensor parallelism needs every row on all etp ranks of its expert, so a row is sent etp times and the etp partial
outputs come back as so many rows of the token; the combine, which sums a token's rows anyway, completes the product.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import permute, unpermute
from kernels.sort import sort_pairs
from parallelisms.routing import PairOrder, RoutedTokens, Routing


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


class AllToAllHandle(NamedTuple):
    row_TJ: Tensor
    send: list[int]
    receive: list[int]
    routed: RoutedTokens


class AllToAllDispatcher:
    """S rows are sent, R received. One host sync a layer, for the split sizes that the collective wants."""

    def __init__(self, num_experts: int, group: ProcessGroup, ep: int, etp: int):
        self.num_experts, self.group, self.ep, self.etp = num_experts, group, ep, etp
        self.num_local = num_experts // ep

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[RoutedTokens, AllToAllHandle]:
        T, K = routing.topk_experts_TK.shape
        order = routing.order if self.etp == 1 else self._order_by_destination(routing.topk_experts_TK)
        send_counts = order.counts_E.view(-1, self.num_local)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=self.group)
        send, receive = torch.stack((send_counts.sum(1), receive_counts.sum(1))).tolist()

        row_TJ = order.row_P.view(T, K * self.etp)
        rows_SD = permute(x_TD, row_TJ, sum(send))
        weights_S1 = permute(routing.topk_weights_TK.reshape(T * K, 1), order.row_P.view(T * K, self.etp), sum(send))
        rows_RD = _AllToAll.apply(rows_SD, send, receive, self.group)
        weights_R1 = _AllToAll.apply(weights_S1, send, receive, self.group)

        # Rows arrive by (source, expert); the experts take them by (expert, source).
        source_experts = torch.arange(self.num_local, device=x_TD.device).repeat(receive_counts.shape[0])
        expert_R = source_experts.repeat_interleave(receive_counts.flatten(), output_size=sum(receive))
        received_R, sorted_R, _, offsets_e = sort_pairs(expert_R, self.num_local)
        routed = RoutedTokens(rows_RD, weights_R1.squeeze(1), received_R, sorted_R.unsqueeze(1), offsets_e)
        return routed, AllToAllHandle(row_TJ, send, receive, routed)

    def combine(self, rows_RD: Tensor, handle: AllToAllHandle) -> Tensor:
        by_source_RD = unpermute(rows_RD, handle.routed.row_NK)
        rows_SD = _AllToAll.apply(by_source_RD, handle.receive, handle.send, self.group)
        return unpermute(rows_SD, handle.row_TJ)

    def _order_by_destination(self, topk_experts_TK: Tensor) -> PairOrder:
        """Order of every (token, choice, etp rank): first by receiving rank, then by its local expert."""
        shard_J = torch.arange(self.etp, device=topk_experts_TK.device)
        expert_TK1 = topk_experts_TK.unsqueeze(-1)
        rank_TKJ = (expert_TK1 // self.num_local) * self.etp + shard_J
        key_TKJ = rank_TKJ * self.num_local + expert_TK1 % self.num_local
        num_keys = self.num_experts * self.etp
        key_TKJ = torch.where(expert_TK1 < self.num_experts, key_TKJ, num_keys)
        return PairOrder(*sort_pairs(key_TKJ.flatten(), num_keys))
