"""All-to-all dispatch over NCCL or gloo: a token travels once to each rank that holds one of its experts.

It takes its experts and weights along, and the receiver names the rows. On the way back a rank adds up its rows of a token in
fp32 and sends the sum in the tokens' type; the token's rank adds the ranks' sums in fp32. Under expert tensor parallelism all etp
ranks of an expert get the token; their sums are parts of one product and are added like all others.
"""

from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import gather_sum, spread_rows
from kernels.sort import sort_pairs
from parallelisms.dispatch.base import Meanwhile
from parallelisms.routing import RoutedTokens, Routing


class _Counts(NamedTuple):
    """Tokens that go to each rank, tokens that come from each, and the pairs that come with them."""

    send: list[int]
    receive: list[int]
    pairs: int


class _Trip:
    """The way of one layer's tokens to the ranks of their experts: S copies leave this rank and N arrive.

    Args:
        row_TJ: where a token's copies stand among the S, which go by rank; -1 for nowhere.
        outgoing_W2: int64 tokens and pairs for each rank.
    """

    def __init__(self, row_TJ: Tensor, outgoing_W2: Tensor, group: ProcessGroup):
        self.row_TJ, self.group = row_TJ, group
        incoming_W2 = torch.empty_like(outgoing_W2)
        dist.all_to_all_single(incoming_W2, outgoing_W2, group=group)
        self._on_host = torch.stack((outgoing_W2, incoming_W2)).to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream().record_event() if row_TJ.is_cuda else None

    @cached_property
    def counts(self) -> _Counts:
        """The host waits for these, but for nothing that was launched since the trip began."""
        if self._arrived is not None:
            self._arrived.synchronize()
        (send, _), (receive, pairs) = self._on_host.transpose(1, 2).tolist()
        return _Counts(send, receive, sum(pairs))

    def spread(self, x_TD: Tensor) -> Tensor:
        """The S copies of the tokens, in a buffer for as many as there can be."""
        T, J = self.row_TJ.shape
        return spread_rows(x_TD, self.row_TJ, T * min(J, self.group.size()))

    def start(self, sent_SD: Tensor) -> tuple[Tensor, dist.Work]:
        """Sends the copies; what arrives is there after the work."""
        send, receive, _ = self.counts
        received_ND = sent_SD.new_empty(sum(receive), sent_SD.shape[1])
        sent_SD = sent_SD[: sum(send)]
        return received_ND, dist.all_to_all_single(received_ND, sent_SD, receive, send, group=self.group, async_op=True)

    def there(self, x_TD: Tensor) -> Tensor:
        received_ND, work = self.start(self.spread(x_TD))
        work.wait()
        return received_ND

    def back(self, *x_ND: Tensor, meanwhile: Meanwhile | None = None) -> list[Tensor]:
        """Returns every copy of each to its token's rank, which adds them."""
        send, receive, _ = self.counts
        returned_SD = [x.new_empty(sum(send), x.shape[1]) for x in x_ND]
        works = [
            dist.all_to_all_single(returned, x.contiguous(), send, receive, group=self.group, async_op=True)
            for returned, x in zip(returned_SD, x_ND, strict=True)
        ]
        if meanwhile is not None:
            meanwhile()
        for work in works:
            work.wait()
        return [gather_sum(returned, self.row_TJ) for returned in returned_SD]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, trip: _Trip, first_expert: int, num_local: int, meanwhile
    ):
        ctx.trip, ctx.meanwhile, K = trip, meanwhile, experts_TK.shape[1]
        # Bits of experts and weights side by side, in one message.
        sent_SM = trip.spread(torch.cat((experts_TK.int(), weights_TK.view(torch.int32)), dim=1))
        sent_SD = trip.spread(x_TD)
        meta_NM, meta_arrival = trip.start(sent_SM)
        tokens_ND, arrival = trip.start(sent_SD)
        meta_arrival.wait()
        local_NK = meta_NM[:, :K] - first_expert
        key_NK = torch.where((local_NK >= 0) & (local_NK < num_local), local_NK, num_local)
        pair_P, row_P, _, offsets_e = sort_pairs(key_NK.flatten(), num_local)
        weights_NK = meta_NM[:, K:].contiguous().view(weights_TK.dtype)
        arrival.wait()
        names = pair_P[: trip.counts.pairs], row_P.view_as(key_NK), offsets_e
        ctx.mark_non_differentiable(*names)
        return tokens_ND, weights_NK, *names

    @staticmethod
    def backward(ctx, grad_ND: Tensor, grad_NK: Tensor, *_):
        return *ctx.trip.back(grad_ND, grad_NK, meanwhile=ctx.meanwhile), *[None] * 5


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, row_NK: Tensor, trip: _Trip):
        ctx.trip, ctx.num_rows = trip, len(rows_RD)
        ctx.save_for_backward(row_NK)
        return trip.back(gather_sum(rows_RD, row_NK))[0]

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (row_NK,) = ctx.saved_tensors
        return spread_rows(ctx.trip.there(grad_TD), row_NK, ctx.num_rows), None, None


class AllToAllHandle(NamedTuple):
    row_NK: Tensor
    trip: _Trip


class AllToAllDispatcher:
    """One host sync a layer, for the sizes that the collective wants; the copies to send are made meanwhile."""

    def __init__(self, num_experts: int, group: ProcessGroup, ep: int, etp: int):
        self.group, self.ep, self.etp = group, ep, etp
        self.num_local = num_experts // ep
        self.first_expert = group.rank() // etp * self.num_local

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> tuple[RoutedTokens, AllToAllHandle]:
        experts_TK = routing.topk_experts_TK
        row_TJ, tokens_W = self._copies(experts_TK)
        pairs_W = routing.tokens_per_expert_E.view(self.ep, self.num_local).sum(1).repeat_interleave(self.etp)
        trip = _Trip(row_TJ, torch.stack((tokens_W, pairs_W), dim=1), self.group)
        tokens_ND, weights_NK, *names = _Dispatch.apply(
            x_TD, routing.topk_weights_TK, experts_TK, trip, self.first_expert, self.num_local, meanwhile
        )
        routed = RoutedTokens(tokens_ND, weights_NK.flatten(), *names)
        return routed, AllToAllHandle(routed.row_NK, trip)

    def combine(self, rows_RD: Tensor, handle: AllToAllHandle) -> Tensor:
        return _Combine.apply(rows_RD, *handle)

    def _copies(self, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the token for each of its J = K * etp (choice, shard) pairs but those for a rank that has one already: where
        they stand in the order of the ranks [T, J], and how many go to each rank [W]."""
        holder_TK = experts_TK // self.num_local
        repeated_TK = (holder_TK[:, :, None] == holder_TK[:, None, :]).tril(-1).any(-1)
        rank_TKj = holder_TK[:, :, None] * self.etp + torch.arange(self.etp, device=experts_TK.device)
        left_out_TK = repeated_TK | (holder_TK == self.ep)
        key_TKj = torch.where(left_out_TK[:, :, None], self.group.size(), rank_TKj)
        _, row_P, tokens_W, _ = sort_pairs(key_TKj.flatten(), self.group.size())
        return row_P.view(len(experts_TK), experts_TK.shape[1] * self.etp), tokens_W
