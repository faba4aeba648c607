"""The interface of every dispatcher."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from kernels.permute import TokenGradients
from parallelisms.routing import RoutedTokens, Routing

Meanwhile = Callable[[], None]


def stand_in(x_TD: Tensor, packed_NW: Tensor) -> Tensor:
    """[N, D] without values or memory, for the gradient of tokens that arrived packed."""
    return x_TD.new_empty(()).expand(len(packed_NW), x_TD.shape[1])


class Dispatcher(Protocol):
    """Sends tokens to their experts and brings the results back. Combine is dispatch's adjoint: each is the other's backward."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None, packed_TW: Tensor | None = None
    ) -> tuple[RoutedTokens, Any]:
        """Returns the rows of this rank's experts, and a handle that :meth:`combine` needs.

        Args:
            meanwhile: work of backward that may run while the gradients are on their way; not every dispatcher calls it.
            packed_TW: the tokens packed, to travel in place of ``x_TD``; local, alltoall and nvlink take it.
        """

    def even_rows(self, choices: int) -> int | None:
        """Rows that this rank's experts get when loads are even, where they have fixed room for more; None where what comes makes
        the room."""

    def combine(self, rows_RD: Tensor, handle: Any, grads: TokenGradients | None = None) -> Tensor:
        """Adds each token's expert outputs in fp32; returns y_TD in the rows' dtype, zero for tokens not routed.

        Args:
            grads: takes, in backward, the gradients of the tokens that this rank's experts had; allgather and hybridep leave
                it empty, and give the gradients of rows.
        """
