"""All-to-all dispatch over NCCL or gloo: a token travels once to each rank that holds one of its experts.

It takes its experts and weights along, and the receiver names the rows. On the way back a rank adds up its rows of a token in
fp32 and sends the sum in the tokens' type; the token's rank adds the ranks' sums in fp32. Under expert tensor parallelism all etp
ranks of an expert get the token; their sums are parts of one product and are added like all others.

Ranks of several domains are reached in two such exchanges, hops: a token goes once to each domain that holds one of its experts,
to the rank there that has its own rank's place, and from there on within the domain. On the way back that rank adds the sums.
"""

from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import TokenGradients, gather_sum, spread_rows
from kernels.sort import sort_pairs
from parallelisms.dispatch.base import Dispatcher, Meanwhile, stand_in
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.domains import Domains
from parallelisms.routing import PairOrder, RoutedTokens, Routing


class Hop:
    """An exchange among ``ep`` holders of as many experts each, a holder being ``etp`` consecutive ranks of the group."""

    def __init__(self, num_experts: int, group: ProcessGroup, ep: int, etp: int):
        self.group, self.ep, self.etp = group, ep, etp
        self.num_local = num_experts // ep
        self.first_expert = group.rank() // etp * self.num_local


def hops_over(num_experts: int, domains: Domains, ep: int, etp: int) -> tuple[Hop, Hop]:
    """Between domains, of which each or ``etp / domain`` consecutive ones hold the same experts, and within this rank's."""
    domain = domains.within.size()
    inner_ep, inner_etp = max(domain // etp, 1), min(domain, etp)
    between = Hop(num_experts, domains.between, ep // inner_ep, etp // inner_etp)
    return between, Hop(between.num_local, domains.within, inner_ep, inner_etp)


def _copies(experts_TK: Tensor, num_local: int, ep: int, etp: int) -> tuple[Tensor, Tensor]:
    """A copy of the token for each of its J = K * etp (choice, shard) pairs but those for a rank that has one already: where they
    stand in the order of the W = ep * etp ranks [T, J], and how many go to each rank [W]."""
    holder_TK = experts_TK // num_local
    repeated_TK = (holder_TK[:, :, None] == holder_TK[:, None, :]).tril(-1).any(-1)
    rank_TKj = holder_TK[:, :, None] * etp + torch.arange(etp, device=experts_TK.device)
    left_out_TK = repeated_TK | (holder_TK == ep)
    key_TKj = torch.where(left_out_TK[:, :, None], ep * etp, rank_TKj)
    _, row_P, tokens_W, _ = sort_pairs(key_TKj.flatten(), ep * etp)
    return row_P.view(len(experts_TK), experts_TK.shape[1] * etp), tokens_W


class _Sizes:
    """Numbers for which the host waits where it first needs them, but for nothing that was launched since they were made."""

    def __init__(self, parts: list[Tensor]):
        self._lengths = [len(part) for part in parts]
        self._on_host = torch.cat(parts).to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream().record_event() if parts[0].is_cuda else None

    @cached_property
    def parts(self) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [part.tolist() for part in self._on_host.split(self._lengths)]

    @property
    def known(self) -> bool:
        return "parts" in self.__dict__


class _Trip:
    """The way of one layer's tokens over one hop: S copies leave this rank and N arrive.

    Args:
        row_TJ: where a token's copies stand among the S, which go by rank; -1 for nowhere.
        sizes: of which parts ``2 number`` and ``2 number + 1`` are the tokens that go to each rank, and that come from each.
    """

    def __init__(self, row_TJ: Tensor, group: ProcessGroup, sizes: _Sizes, number: int):
        self.row_TJ, self.group, self._sizes, self._number = row_TJ, group, sizes, number

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        send, receive = self._sizes.parts[2 * self._number : 2 * self._number + 2]
        return send, receive

    def spread(self, x_TD: Tensor) -> Tensor:
        """The S copies of the tokens; while the host does not know S, in a buffer for as many as there can be."""
        T, J = self.row_TJ.shape
        most = T * min(J, self.group.size())
        return spread_rows(x_TD, self.row_TJ, sum(self.counts[0]) if self._sizes.known else most)

    def start(self, sent_SD: Tensor) -> tuple[Tensor, dist.Work]:
        """Sends the copies; what arrives is there after the work."""
        send, receive = self.counts
        received_ND = sent_SD.new_empty(sum(receive), sent_SD.shape[1])
        sent_SD = sent_SD[: sum(send)]
        return received_ND, dist.all_to_all_single(received_ND, sent_SD, receive, send, group=self.group, async_op=True)

    def there(self, x_TD: Tensor) -> Tensor:
        received_ND, work = self.start(self.spread(x_TD))
        work.wait()
        return received_ND

    def back(self, *x_ND: Tensor, meanwhile: Meanwhile | None = None) -> list[Tensor]:
        """Returns every copy of each to its token's rank, which adds them."""
        send, receive = self.counts
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


class _Send(torch.autograd.Function):
    """Tokens and weights to the ranks of a hop; there also their local experts and the order of these pairs."""

    @staticmethod
    def forward(
        ctx, x_TD: Tensor, packed_TW: Tensor | None, weights_TK: Tensor, experts_TK: Tensor, hop: Hop, trip: _Trip,
        meanwhile: Meanwhile | None,
    ):  # fmt: skip
        ctx.trip, ctx.meanwhile, K = trip, meanwhile, experts_TK.shape[1]
        # Bits of weights and experts side by side, in one message.
        sent_SM = trip.spread(torch.cat((weights_TK.view(torch.int32), experts_TK.int()), dim=1))
        sent_SD = trip.spread(x_TD if packed_TW is None else packed_TW)
        meta_NM, meta_arrival = trip.start(sent_SM)
        tokens_ND, arrival = trip.start(sent_SD)
        meta_arrival.wait()
        local_NK = meta_NM[:, -K:] - hop.first_expert
        key_NK = torch.where((local_NK >= 0) & (local_NK < hop.num_local), local_NK, hop.num_local)
        names = key_NK, *sort_pairs(key_NK.flatten(), hop.num_local)
        weights_NK = meta_NM[:, :-K].clone(memory_format=torch.contiguous_format).view(weights_TK.dtype)
        arrival.wait()
        if packed_TW is None:
            ctx.mark_non_differentiable(*names)
            return tokens_ND, None, weights_NK, *names
        ctx.mark_non_differentiable(tokens_ND, *names)
        return stand_in(x_TD, tokens_ND), tokens_ND, weights_NK, *names

    @staticmethod
    def backward(ctx, grad_ND: Tensor, _, grad_NK: Tensor, *__):
        grad_TD, grad_TK = ctx.trip.back(grad_ND, grad_NK, meanwhile=ctx.meanwhile)
        return grad_TD, None, grad_TK, *[None] * 4


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums_ND: Tensor, trip: _Trip):
        ctx.trip = trip
        return trip.back(sums_ND)[0]

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        return ctx.trip.there(grad_TD), None


class AllToAllHandle(NamedTuple):
    trips: list[_Trip]
    inside: Any


class AllToAllDispatcher:
    """One host sync a layer, for the sizes that the collectives want, of all hops; the copies to send are made meanwhile.

    Args:
        hops: one, or those of :func:`hops_over` or the first of these.
        inside: takes the tokens from the ranks that the hops end at to those of their experts.
    """

    def __init__(self, hops: list[Hop], inside: Dispatcher | None = None):
        self.hops, self.inside = hops, inside or LocalDispatcher()

    def dispatch(
        self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None, packed_TW: Tensor | None = None
    ) -> tuple[RoutedTokens, AllToAllHandle]:
        row_TJ, sizes = self._measure(routing)
        trips: list[_Trip] = []
        for number, hop in enumerate(self.hops):
            if number > 0:
                row_TJ, _ = _copies(routing.topk_experts_TK, hop.num_local, hop.ep, hop.etp)
            trips.append(_Trip(row_TJ, hop.group, sizes, number))
            x_TD, packed_TW, weights_TK, experts_TK, *order = _Send.apply(
                x_TD, packed_TW, routing.topk_weights_TK, routing.topk_experts_TK, hop, trips[-1],
                meanwhile if number == 0 else None,
            )  # fmt: skip
            routing = Routing(experts_TK, weights_TK, PairOrder(*order))
        [pairs] = sizes.parts[-1]
        routing = routing._replace(order=routing.order._replace(pair_P=routing.order.pair_P[:pairs]))
        routed, inside = self.inside.dispatch(x_TD, routing, None, packed_TW)
        return routed, AllToAllHandle(trips, inside)

    def even_rows(self, choices: int) -> int | None:
        return self.inside.even_rows(choices)

    def combine(self, rows_RD: Tensor, handle: AllToAllHandle, grads: TokenGradients | None = None) -> Tensor:
        y_TD = self.inside.combine(rows_RD, handle.inside, grads)
        for trip in reversed(handle.trips):
            y_TD = _Return.apply(y_TD, trip)
        return y_TD

    def _measure(self, routing: Routing) -> tuple[Tensor, _Sizes]:
        """The copies for the first hop, and of every hop the tokens to and from each rank, then the pairs that end here.

        A hop's counts carry what the ranks behind each of its ranks will get, of which the sum is the next hop's.
        """
        experts_TK, first = routing.topk_experts_TK, self.hops[0]
        ep, etp = (prod(getattr(hop, degree) for hop in self.hops) for degree in ("ep", "etp"))
        num_local = self.hops[-1].num_local
        row_TJ, tokens_H = _copies(experts_TK, first.num_local, first.ep, first.etp)
        tokens_W = tokens_H if len(self.hops) == 1 else _copies(experts_TK, num_local, ep, etp)[1]
        pairs_W = routing.tokens_per_expert_E.view(ep, num_local).sum(1).repeat_interleave(etp)
        counts, parts = torch.stack((tokens_W, pairs_W), dim=1), []
        for hop in self.hops:
            outgoing = torch.cat((tokens_H[:, None], counts.view(len(tokens_H), -1)), dim=1)
            incoming = torch.empty_like(outgoing)
            dist.all_to_all_single(incoming, outgoing, group=hop.group)
            parts += [outgoing[:, 0], incoming[:, 0]]
            counts = incoming[:, 1:].sum(0)
            tokens_H = counts[::2]
        return row_TJ, _Sizes([*parts, counts[1:]])
