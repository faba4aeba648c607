"""The interface of every dispatcher."""

from typing import Any, Protocol

from torch import Tensor

from parallelisms.routing import RoutedTokens, Routing


class Dispatcher(Protocol):
    """Sends tokens to their experts and brings the results back. Combine is dispatch's adjoint: each is the other's backward."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[RoutedTokens, Any]:
        """Returns the rows of this rank's experts, and a handle that :meth:`combine` needs."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Adds each token's expert outputs in fp32; returns y_TD in the rows' dtype, zero for tokens not routed."""
