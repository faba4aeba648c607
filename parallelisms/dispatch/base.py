"""The interface of every dispatcher, and the index build they share."""

from typing import Any, Protocol

import torch
from torch import Tensor

from parallelisms.routing import RoutedTokens, Routing


class Dispatcher(Protocol):
    """Sends tokens to their experts and brings the results back. Combine is dispatch's adjoint, so each is the other's backward."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[RoutedTokens, Any]:
        """Returns the rows of this rank's experts, and a handle that :meth:`combine` needs."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Adds each token's expert outputs in fp32; returns y_TD in the rows' dtype, zero for tokens not routed."""


def sort_by_key(key_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable order of pairs by key, on the device, without a host sync.

    Args:
        key_P: [P] int64 in [0, num_keys]; the key ``num_keys`` means "leave out".
    Returns:
        ``pair_P``: the pairs in key order, those left out last and given as -1;
        ``row_P``: each pair's place in that order, -1 for those left out; ``counts``: [num_keys] int64 pairs per key.
    """
    order_P = torch.argsort(key_P, stable=True)
    places_P = torch.arange(key_P.shape[0], device=key_P.device)
    counts = count(key_P, num_keys)
    present = counts.sum()
    pair_P = torch.where(places_P < present, order_P, -1)
    row_P = torch.empty_like(order_P).scatter_(0, order_P, torch.where(places_P < present, places_P, -1))
    return pair_P, row_P, counts


def count(key_P: Tensor, num_keys: int) -> Tensor:
    """How often each key in [0, num_keys) occurs: [num_keys] int64. Integer addition, so it is exact and deterministic."""
    counts = torch.zeros(num_keys + 1, dtype=torch.int64, device=key_P.device)
    return counts.scatter_add_(0, key_P, torch.ones_like(key_P))[:num_keys]


def offsets_of(counts: Tensor) -> Tensor:
    """Ends of the groups as the grouped products take them: int32 cumulative counts."""
    return counts.cumsum(0, dtype=torch.int32)
