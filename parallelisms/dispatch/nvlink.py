"""Dispatch over NVLink without a host sync: each token goes once to every rank that holds one of its experts.

Received tokens have fixed places, N = ranks * max_tokens of them, and R = N * min(K, local experts) is a capacity that nothing
can exceed; :mod:`parallelisms.dispatch.capacity` has smaller ones. A rank keeps its received tokens for backward, N D elements a
layer whatever the load. What the transfers themselves need is allocated once for all layers: N D elements a rank.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.dispatch import PROGRAMS_OF_SM, push_rows, push_sums, push_tokens
from kernels.permute import TokenGradients
from kernels.sort import sort_pairs
from parallelisms.dispatch.base import Meanwhile, stand_in
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.dispatch.symmetric import open_exchange
from parallelisms.routing import RoutedTokens, Routing

_Result = TypeVar("_Result")

# Multiprocessors of an H200, and how many programs of a transfer leave room on each for those of a product.
_ALL = 132
_PROGRAMS_BESIDE = 2


class _Place(NamedTuple):
    """Where experts lie, as the ops of :mod:`kernels.dispatch` want to know it."""

    exchange: str
    num_local: int
    etp: int


class _Beside(NamedTuple):
    """Work that a transfer, with an exchange of its own, leaves room for."""

    place: _Place
    meanwhile: Meanwhile


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _beside(transfer: Callable[[], _Result], meanwhile: Meanwhile, device: torch.device) -> _Result:
    """What ``transfer`` returns, which runs beside ``meanwhile`` where there are streams.

    The side stream waits for this one before anything runs there, and this one for it before what it reads or returns may be
    freed, so their memory needs no further care.
    """
    if device.type != "cuda":
        result = transfer()
        meanwhile()
        return result
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        result = transfer()
    meanwhile()
    here.wait_stream(side)
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_TD: Tensor, packed_TW: Tensor | None, weights_TK: Tensor, experts_TK: Tensor, place: _Place, beside: _Beside | None
    ):
        sent = x_TD if packed_TW is None else packed_TW
        tokens_ND, weights_NK, key_NK, slot_N = push_tokens(sent, experts_TK, weights_TK, *place)
        ctx.place, ctx.beside = place, beside
        ctx.save_for_backward(experts_TK, slot_N)
        if packed_TW is None:
            ctx.mark_non_differentiable(key_NK, slot_N)
            return tokens_ND, weights_NK, key_NK, None, slot_N
        ctx.mark_non_differentiable(key_NK, slot_N, tokens_ND)
        return stand_in(x_TD, tokens_ND), weights_NK, key_NK, tokens_ND, slot_N

    @staticmethod
    def backward(ctx, grad_tokens_ND: Tensor, grad_weights_NK: Tensor, *_):
        experts_TK, slot_N = ctx.saved_tensors
        grads = grad_tokens_ND, slot_N[:, None], grad_weights_NK, experts_TK
        if ctx.beside is None:
            sums = push_sums(*grads, *ctx.place)
        else:
            sums = _beside(lambda: push_sums(*grads, *ctx.beside.place), ctx.beside.meanwhile, grad_tokens_ND.device)
        grad_TD, grad_TK = sums
        return grad_TD, None, grad_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows_RD: Tensor, row_NK: Tensor, slot_N: Tensor, experts_TK: Tensor, place: _Place, grads: TokenGradients | None
    ):
        ctx.place, ctx.num_rows, ctx.grads = place, len(rows_RD), grads
        ctx.save_for_backward(row_NK, slot_N, experts_TK)
        y_TD, _ = push_sums(rows_RD, row_NK, None, experts_TK, *place)
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        row_NK, slot_N, experts_TK = ctx.saved_tensors
        if ctx.grads is None:
            grad_RD = push_rows(grad_TD, row_NK, experts_TK, ctx.num_rows, *ctx.place)
        else:
            # To its place, as if it were the row of one of its choices.
            place_NK = torch.nn.functional.pad(slot_N[:, None], (0, row_NK.shape[1] - 1), value=-1)
            grad_ND = push_rows(grad_TD, place_NK, experts_TK, len(place_NK), *ctx.place)
            grad_RD = ctx.grads.put(grad_ND, ctx.num_rows)
        return grad_RD, *[None] * 5


class NvlinkHandle(NamedTuple):
    routed: RoutedTokens
    experts_TK: Tensor
    slot_N: Tensor


class NvlinkDispatcher:
    """Ranks of one NVLink domain, or of one host on the CPU; see :mod:`kernels.dispatch` and :mod:`kernels.peers`.

    Args:
        max_tokens: the most tokens that a rank brings; ranks may differ.
        sms: multiprocessors; a transfer has as many programs as fit on so many. None: on all of an H200.
        capacity: a bound on the experts' rows; None gives room for all that can arrive.
    """

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        ep: int,
        etp: int,
        max_tokens: int,
        sms: int | None,
        capacity: RowCapacity | None = None,
    ):
        num_local = num_experts // ep
        exchanges = [open_exchange(group, max_tokens, n * (sms or _ALL)) for n in (PROGRAMS_OF_SM, _PROGRAMS_BESIDE)]
        self.place, self.beside = (_Place(exchange, num_local, etp) for exchange in exchanges)
        self.slots, self.ep, self.capacity = group.size() * max_tokens, ep, capacity

    def dispatch(
        self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None, packed_TW: Tensor | None = None
    ) -> tuple[RoutedTokens, NvlinkHandle]:
        experts_TK, num_local = routing.topk_experts_TK, self.place.num_local
        K = experts_TK.shape[1]
        beside = None if meanwhile is None else _Beside(self.beside, meanwhile)
        tokens_ND, weights_NK, key_NK, packed_NW, slot_N = _Dispatch.apply(
            x_TD, packed_TW, routing.topk_weights_TK, experts_TK, self.place, beside
        )
        pair_P, row_P, _, offsets_e = sort_pairs(key_NK.flatten(), num_local)
        rows = most = self.slots * min(K, num_local)
        if self.capacity is not None and (rows := self.capacity.rows(self.even_rows(K), most)) < most:
            row_P, offsets_e = self.capacity.cut(row_P, offsets_e, rows)
        routed = RoutedTokens(tokens_ND, weights_NK.flatten(), pair_P[:rows], row_P.view_as(key_NK), offsets_e, packed_NW)
        return routed, NvlinkHandle(routed, experts_TK, slot_N)

    def even_rows(self, choices: int) -> int:
        return self.slots * choices // self.ep

    def combine(self, rows_RD: Tensor, handle: NvlinkHandle, grads: TokenGradients | None = None) -> Tensor:
        return _Combine.apply(rows_RD, handle.routed.row_NK, handle.slot_N, handle.experts_TK, self.place, grads)
