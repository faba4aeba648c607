"""Token-choice top-K router in fp32, whatever the compute type."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.moe.moe import MoEArgs
from torchtitan.models.utils import trunc_normal_

from kernels.gate import gate_logits
from moe_titan.layers.balance_loss import BalanceLoss, attach_loss
from parallelisms.dispatch.base import count
from parallelisms.routing import Routing, RoutingTape


class Router(nn.Module):
    """Scores every expert for every token and chooses K of them; returns its decision and changes nothing.

    Scores are softmax or sigmoid of the gate's logits. Experts are chosen by score plus expert bias (arXiv 2408.15664),
    within the best ``num_limited_groups`` groups where node-limited routing is on (arXiv 2412.19437); the weights are the
    scores without bias, optionally normalised over the K and scaled. Ties go to the lower index on every device.
    """

    def __init__(self, args: MoEArgs, dim: int):
        super().__init__()
        self.args = args
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
        args = self.args
        logits_TE = gate_logits(x_TD, _local(self.gate.weight))
        if self.gate.bias is not None:
            logits_TE = logits_TE + _local(self.gate.bias)
        scores_TE = logits_TE.softmax(-1) if args.score_func == "softmax" else logits_TE.sigmoid()

        valid_T = tape.valid_T if tape is not None else None
        experts_TK = tape.chosen_experts(layer) if tape is not None else None
        if experts_TK is None:
            experts_TK = self._choose(scores_TE.detach(), bias_E)
            if valid_T is not None:
                experts_TK = torch.where(valid_T[:, None], experts_TK, args.num_experts)

        weights_TK = scores_TE.gather(1, experts_TK.clamp(max=args.num_experts - 1))
        if args.route_norm:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * args.route_scale
        if valid_T is not None:
            weights_TK = torch.where(valid_T[:, None], weights_TK, 0)

        loss = None
        if self.balance_loss is not None and tape is not None:
            loss = self.balance_loss(scores_TE, valid_T, num_sequences, tape.loss_denominator)
            weights_TK = attach_loss(weights_TK, loss)
        return Routing(experts_TK, weights_TK, count(experts_TK.flatten(), args.num_experts), loss)

    def _choose(self, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        args = self.args
        T, E = scores_TE.shape
        if args._debug_force_load_balance:
            return torch.arange(T * args.top_k, device=scores_TE.device).view(T, args.top_k) % E
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if args.num_expert_groups is not None:
            choice_TGe = choice_TE.unflatten(1, (args.num_expert_groups, -1))
            group_score_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
            kept_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
            kept_TG.scatter_(1, stable_topk(group_score_TG, args.num_limited_groups), True)
            choice_TE = choice_TGe.masked_fill(~kept_TG[:, :, None], -torch.inf).flatten(1)
        return stable_topk(choice_TE, args.top_k)


def stable_topk(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, ties to the lower index: [T, k] int64.

    ``torch.topk`` leaves the order of equal values to the kernel, so that two devices, or two ways of batching, could route a
    token differently.
    """
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _local(parameter: Tensor) -> Tensor:
    """This rank's copy of a replicated parameter. Its tensor-parallel peers route other tokens, so the gradients are partial sums."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter
