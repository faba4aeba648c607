"""Token-choice top-K router in fp32, whatever the compute type."""

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoEArgs
from torchtitan.models.utils import trunc_normal_

from kernels.route import COUNTED_TOKENS, RouteOptions, route
from kernels.sort import sort_pairs
from moe_titan.layers.balance_loss import BalanceLoss, attach_loss
from parallelisms.routing import PairOrder, Routing, RoutingTape
from parallelisms.tensor_parallel import own_copy


class Router(nn.Module):
    """Scores every expert for every token and chooses K of them; returns its decision and changes nothing.

    Scores are softmax or sigmoid of the gate's logits. Experts are chosen by score plus expert bias (arXiv 2408.15664),
    within the best ``num_limited_groups`` groups where node-limited routing is on (arXiv 2412.19437); the weights are the
    scores without bias, optionally normalised over the K and scaled. Ties go to the lower index on every device.
    """

    def __init__(self, args: MoEArgs, dim: int):
        super().__init__()
        self.num_experts = args.num_experts
        self.force_balance = args._debug_force_load_balance
        self.options = RouteOptions(
            args.top_k,
            args.score_func == "softmax",
            args.route_norm,
            args.route_scale,
            args.num_expert_groups or 0,
            args.num_limited_groups or 0,
        )
        self.gate = nn.Linear(dim, args.num_experts, bias=args.gate_bias)
        self.balance_loss: BalanceLoss | None = None

    def init_weights(self, init_std: float) -> None:
        trunc_normal_(self.gate.weight, std=init_std)
        if self.gate.bias is not None:
            nn.init.zeros_(self.gate.bias)

    def forward(self, x_TD: Tensor, bias_E: Tensor | None, num_sequences: int, tape: RoutingTape | None, layer: str) -> Routing:
        """
        Args:
            x_TD: this rank's tokens, the shares of ``num_sequences`` sequences one after the other.
            bias_E: fp32 expert bias, or None.
            tape: the pass's tape (valid tokens, loss denominator, experts to replay), or None.
        """
        valid_T = tape.valid_T if tape is not None else None
        chosen_TK = tape.chosen_experts(layer) if tape is not None else None
        if chosen_TK is None and self.force_balance:
            T, K = x_TD.shape[0], self.options.top_k
            chosen_TK = torch.arange(T * K, device=x_TD.device).view(T, K) % self.num_experts
        bias = None if self.gate.bias is None else own_copy(self.gate.bias)
        experts_TK, weights_TK, scores_TE, block_counts = route(
            x_TD,
            own_copy(self.gate.weight),
            self.options,
            gate_bias_E=bias,
            bias_E=bias_E,
            valid_T=valid_T,
            chosen_TK=chosen_TK,
        )
        loss = None
        if self.balance_loss is not None and tape is not None:
            loss = self.balance_loss(scores_TE, valid_T, num_sequences, tape.loss_denominator)
            weights_TK = attach_loss(weights_TK, loss)
        block_pairs = COUNTED_TOKENS * self.options.top_k
        order = PairOrder(*sort_pairs(experts_TK.flatten(), self.num_experts, block_counts, block_pairs))
        return Routing(experts_TK, weights_TK, order, loss)
