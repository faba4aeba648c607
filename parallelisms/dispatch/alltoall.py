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
from parallelisms.dispatch.base import offsets_of, sort_by_key
from parallelisms.routing import RoutedTokens, Routing


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
    token_S: Tensor
    row_TJ: Tensor
    send: list[int]
    receive: list[int]
    received_R: Tensor
    sorted_R1: Tensor


class AllToAllDispatcher:
    """S rows are sent, R received. One host sync a layer, for the split sizes that the collective wants."""

    def __init__(self, num_experts: int, group: ProcessGroup, ep: int, etp: int):
        self.num_experts, self.group, self.ep, self.etp = num_experts, group, ep, etp
        self.num_local = num_experts // ep

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[RoutedTokens, AllToAllHandle]:
        T, K = routing.topk_experts_TK.shape
        pair_P, row_P, counts_Ge = sort_by_key(self._destinations(routing.topk_experts_TK), self._num_keys)
        send_counts = counts_Ge.view(-1, self.num_local)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts, group=self.group)
        send, receive = torch.stack((send_counts.sum(1), receive_counts.sum(1))).tolist()

        pair_S = pair_P[: sum(send)]
        token_S, row_TJ = pair_S // (K * self.etp), row_P.view(T, K * self.etp)
        rows_SD = permute(x_TD, token_S, row_TJ)
        weights_S1 = permute(routing.topk_weights_TK.reshape(T * K, 1), pair_S // self.etp, row_P.view(T * K, self.etp))
        rows_RD = _AllToAll.apply(rows_SD, send, receive, self.group)
        weights_R1 = _AllToAll.apply(weights_S1, send, receive, self.group)

        # Rows arrive by (source, expert) and leave by (expert, source).
        source_experts = torch.arange(self.num_local, device=x_TD.device).repeat(receive_counts.shape[0])
        expert_R = source_experts.repeat_interleave(receive_counts.flatten(), output_size=sum(receive))
        received_R, sorted_R, counts_e = sort_by_key(expert_R, self.num_local)
        sorted_R1 = sorted_R.unsqueeze(1)
        routed = RoutedTokens(
            permute(rows_RD, received_R, sorted_R1),
            offsets_of(counts_e),
            permute(weights_R1, received_R, sorted_R1).squeeze(1),
        )
        return routed, AllToAllHandle(token_S, row_TJ, send, receive, received_R, sorted_R1)

    def combine(self, rows_RD: Tensor, handle: AllToAllHandle) -> Tensor:
        by_source_RD = unpermute(rows_RD, handle.received_R, handle.sorted_R1)
        rows_SD = _AllToAll.apply(by_source_RD, handle.receive, handle.send, self.group)
        return unpermute(rows_SD, handle.token_S, handle.row_TJ)

    @property
    def _num_keys(self) -> int:
        return self.num_experts * self.etp

    def _destinations(self, topk_experts_TK: Tensor) -> Tensor:
        """Key of every (token, choice, etp rank): first the receiving rank, then its local expert. Flat, [T * K * etp]."""
        shard_J = torch.arange(self.etp, device=topk_experts_TK.device)
        expert_TK1 = topk_experts_TK.unsqueeze(-1)
        rank_TKJ = (expert_TK1 // self.num_local) * self.etp + shard_J
        key_TKJ = rank_TKJ * self.num_local + expert_TK1 % self.num_local
        return torch.where(expert_TK1 < self.num_experts, key_TKJ, self._num_keys).flatten()
