"""All experts on this rank: the router's own order, nothing to send."""

from torch import Tensor

from kernels.permute import TokenGradients, unpermute
from parallelisms.dispatch.base import Meanwhile
from parallelisms.routing import RoutedTokens, Routing


class LocalDispatcher:
    """Capacity R = T * K, known without looking at the data, so nothing here waits for the device."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None, packed_TW: Tensor | None = None
    ) -> tuple[RoutedTokens, RoutedTokens]:
        order = routing.order
        row_TK = order.row_P.view_as(routing.topk_experts_TK)
        routed = RoutedTokens(x_TD, routing.topk_weights_TK.flatten(), order.pair_P, row_TK, order.offsets_E, packed_TW)
        return routed, routed

    def even_rows(self, choices: int) -> None:
        return None

    def combine(self, rows_RD: Tensor, handle: RoutedTokens, grads: TokenGradients | None = None) -> Tensor:
        return unpermute(rows_RD, handle.row_NK, grads)
