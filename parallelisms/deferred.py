"""Weight gradients that are made while a dispatch's backward is under way.

Nothing in a layer's backward waits for a weight's gradient, so it is what can run while the gradients of tokens travel (delayed
weight gradients; Megatron-Core calls them ``delay_wgrad_compute``).
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Deferred:
    """One weight's gradient in one backward pass. :meth:`hold` the weight before the dispatch, so that autograd asks for its
    gradient after the dispatch's backward has had its chance to :meth:`run` what was :meth:`put_off`."""

    def __init__(self) -> None:
        self._compute: Callable[[], Tensor] | None = None
        self._grad: Tensor | None = None

    def hold(self, weight: Tensor) -> Tensor:
        """The weight, whose gradient is what :meth:`put_off` says and not what arrives."""
        return _Held.apply(weight, self)

    def put_off(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    def run(self) -> None:
        if self._compute is not None:
            self._grad, self._compute = self._compute(), None

    def take(self) -> Tensor:
        self.run()
        grad, self._grad = self._grad, None
        assert grad is not None
        return grad


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, deferred: Deferred):
        ctx.deferred = deferred
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, _: Tensor):
        return ctx.deferred.take(), None
