"""Auxiliary-loss-free load balancing, applied once per optimizer step."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_titan.layers.moe import MoE
from parallelisms.routing import RoutingTape


class LoadBalancer:
    """Owns every layer's expert bias and load counts (arXiv 2408.15664).

    ``add`` takes the counts of each training micro-batch; ``step`` reduces them once over the ranks, moves each bias by
    ``coeff * sign(mean load - load)``, centred, and returns the counts. Evaluation adds nothing.

    Args:
        model: its :class:`MoE` layers are balanced where their ``load_balance_coeff`` is set, and counted in any case.
        group: ranks that hold different tokens of the same layers; None for one.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None):
        self.layers = {module.layer: module for module in model.modules() if isinstance(module, MoE)}
        self.group = group
        self._counts: dict[str, Tensor] = {}

    def add(self, tape: RoutingTape) -> None:
        for layer, routing in tape.layers.items():
            counts_E = routing.tokens_per_expert_E
            self._counts[layer] = self._counts[layer] + counts_E if layer in self._counts else counts_E

    def forget(self) -> None:
        """Drops the counts collected since the last step."""
        self._counts.clear()

    @torch.no_grad()
    def step(self, halted: Tensor | None = None) -> dict[str, Tensor]:
        """Applies the collected counts and forgets them.

        Args:
            halted: bool scalar on the device; true leaves the biases as they are.
        Returns:
            Tokens per expert of the global batch, int64, by layer.
        """
        if not self.layers:
            return {}
        counts = [self._counts[layer] for layer in self.layers]
        total = torch.cat(counts)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        loads = dict(zip(self.layers, total.split([c.numel() for c in counts]), strict=True))
        alike: dict[tuple[int, float], list[str]] = {}
        for layer, moe in self.layers.items():
            if moe.expert_bias is not None:
                alike.setdefault((loads[layer].numel(), moe.load_balance_coeff), []).append(layer)
        for (_, coeff), layers in alike.items():
            load_LE = torch.stack([loads[layer] for layer in layers]).double()
            direction_LE = torch.sign(load_LE.mean(1, keepdim=True) - load_LE).float()
            move_LE = coeff * (direction_LE - direction_LE.mean(1, keepdim=True))
            if halted is not None:
                move_LE = torch.where(halted, 0, move_LE)
            torch._foreach_add_([self.layers[layer].expert_bias for layer in layers], list(move_LE.unbind()))
        self.forget()
        return loads
