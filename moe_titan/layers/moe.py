"""The mixture-of-experts block that takes the place of torchtitan's, under the same names in the state dict."""

from functools import partial

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import FeedForward, MoEArgs

from kernels.permute import TokenGradients
from moe_titan.layers.experts import GroupedExperts
from moe_titan.layers.router import Router
from parallelisms.dispatch import Dispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.routing import Placement, active_tape


class MoE(nn.Module):
    """Route, dispatch, experts, combine, plus the shared experts.

    The routing weight multiplies the activation before the down projection; that projection is linear, so the output is that of
    weighting the expert outputs (``score_before_experts = False``; scaling the inputs is another function).

    ``placement`` is written by :class:`moe_titan.layers.expert_placement.ExpertPlacement`; None where every expert is in the slot
    of its own number.

    ``expert_bias`` is read here and written by :class:`moe_titan.layers.load_balancer.LoadBalancer` alone.
    """

    def __init__(self, args: MoEArgs, dim: int, hidden_dim: int, layer: str):
        super().__init__()
        self.layer = layer
        self.router = Router(args, dim)
        self.experts = GroupedExperts(dim, hidden_dim, args.num_experts)
        shared_dim = hidden_dim * args.num_shared_experts
        self.shared_experts = FeedForward(dim, shared_dim) if shared_dim else None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.placement: Placement | None = None
        self.load_balance_coeff = args.load_balance_coeff
        bias = None if args.load_balance_coeff is None else torch.zeros(args.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias, persistent=bias is not None)

    def init_weights(self, init_std: float, buffer_device: torch.device) -> None:
        self.experts.init_weights(init_std)
        self.router.init_weights(init_std)
        if self.shared_experts is not None:
            self.shared_experts.init_weights(init_std)
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros(self.experts.num_experts, dtype=torch.float32, device=buffer_device)

    # The number of rows depends on the data; compiled regions end before and begin again after it.
    @torch.compiler.disable(recursive=True)
    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]; S is this rank's share of the sequence."""
        x_TD = x_BSD.flatten(0, 1)
        tape = active_tape()
        routing = self.router(x_TD, self.expert_bias, x_BSD.shape[0], tape, self.layer)
        if tape is not None:
            tape.record(self.layer, routing)
        if self.placement is not None:
            routing = self.placement.of_slots(routing)
        held = self.experts.defer()
        packing = self.experts.products.packing
        dispatch = self.dispatcher.dispatch
        if packing is not None:
            dispatch = partial(dispatch, packed_TW=packing.pack(x_TD))
        routed, handle = dispatch(x_TD, routing, None if held is None else held.deferred.run)
        grads = TokenGradients() if self.experts.takes_token_grads else None
        y_BSD = self.dispatcher.combine(self.experts(routed, held, grads), handle, grads).view_as(x_BSD)
        return y_BSD if self.shared_experts is None else y_BSD + self.shared_experts(x_BSD)
