"""The routed experts' weights and their feed-forward."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.utils import trunc_normal_

from kernels.expert_mlp import HIGH_PRECISION, expert_mlp
from kernels.permute import TokenGradients
from moe_titan.layers.row_stash import RowStash
from parallelisms.deferred import Deferred
from parallelisms.routing import RoutedTokens
from parallelisms.sharding_plan import local


class Held(NamedTuple):
    """This rank's share of w13, and what makes its gradient later."""

    w13_e2FD: Tensor
    deferred: Deferred


class GroupedExperts(nn.Module):
    """SwiGLU experts as grouped products.

    Gate and up weights (torchtitan's w1 and w3) live in one parameter ``w13`` [E, 2, F, D], so that one product reads the tokens
    once for both. Whoever saves, loads, initialises or counts parameters sees them apart (see
    :func:`parallelisms.sharding_plan.logical_tensors`).
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int):
        super().__init__()
        self.num_experts = num_experts
        self.recompute = False
        self.products = HIGH_PRECISION
        self.stash: RowStash | None = None
        self.mlp = expert_mlp
        self.w13 = nn.Parameter(torch.empty(num_experts, 2, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))

    def init_weights(self, init_std: float) -> None:
        trunc_normal_(self.w13.select(1, 0), std=0.02)
        trunc_normal_(self.w2, std=init_std)
        trunc_normal_(self.w13.select(1, 1), std=init_std)

    def defer(self) -> Held | None:
        """Before the dispatch, to have the gradient of w13 made during the dispatch's backward. None where FSDP2 has the weights,
        which are not there yet, and where another library makes the gradient."""
        if isinstance(self, FSDPModule) or self.mlp is not expert_mlp:
            return None
        deferred = Deferred()
        return Held(deferred.hold(local(self.w13)), deferred)

    @property
    def takes_token_grads(self) -> bool:
        """Whether backward may get the gradients of tokens in place of those of their rows."""
        return self.mlp is expert_mlp and self.products.takes_token_grads

    def forward(self, routed: RoutedTokens, held: Held | None = None, grads: TokenGradients | None = None) -> Tensor:
        """Outputs [R, D] of the local experts, each times its routing weight; rows past the last offset are unspecified.

        Args:
            held: from :meth:`defer`.
            grads: where combine puts the gradients of the tokens.
        """
        w13_e2FD, put_off = (local(self.w13), None) if held is None else (held.w13_e2FD, held.deferred.put_off)
        tokens_ND, weights_P, *indices, packed_NW = routed
        stash = None if self.stash is None else self.stash.stash
        weights = w13_e2FD, local(self.w2), weights_P
        return self.mlp(tokens_ND, *weights, *indices, self.recompute, self.products, put_off, stash, packed_NW, grads)
