"""All experts on this rank: a permutation and its adjoint."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.permute import permute, unpermute
from parallelisms.dispatch.base import offsets_of, sort_by_key
from parallelisms.routing import RoutedTokens, Routing


class LocalHandle(NamedTuple):
    token_R: Tensor
    row_TK: Tensor


class LocalDispatcher:
    """Capacity R = T * K, known without looking at the data, so nothing here waits for the device."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[RoutedTokens, LocalHandle]:
        T, K = routing.topk_experts_TK.shape
        pair_R, row_P, counts_E = sort_by_key(routing.topk_experts_TK.flatten(), self.num_experts)
        token_R = torch.where(pair_R >= 0, pair_R // K, -1)
        rows_RD = permute(x_TD, token_R, row_P.view(T, K))
        weights_R = permute(routing.topk_weights_TK.reshape(T * K, 1), pair_R, row_P.view(T * K, 1)).squeeze(1)
        return RoutedTokens(rows_RD, offsets_of(counts_E), weights_R), LocalHandle(token_R, row_P.view(T, K))

    def combine(self, rows_RD: Tensor, handle: LocalHandle) -> Tensor:
        return unpermute(rows_RD, handle.token_R, handle.row_TK)
