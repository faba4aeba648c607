"""AdamW over this rank's shards, with one gradient norm over parameters of both meshes."""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.sharding_plan import ShardingPlan

MOMENTS = ("exp_avg", "exp_avg_sq")


class NonFiniteGradient(RuntimeError):
    """A gradient holds NaN or infinity. The parameters are as before the step."""


class ShardedAdamW:
    """AdamW on the local shards of DTensor parameters.

    The update is elementwise, so it needs no mesh: working on plain tensors lets one fused kernel take parameters of
    all meshes, and spares the host the DTensor dispatch.

    Args:
        model: parallelised; its parameters are DTensors, gradients summed by FSDP2.
        plan: the model's sharding plan.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        implementation: Literal["for-loop", "foreach", "fused"],
    ):
        self.plan = plan
        self.parameters: dict[str, DTensor] = dict(model.named_parameters())
        self._shards = {name: nn.Parameter(p.to_local().detach()) for name, p in self.parameters.items()}
        kind = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
        # The rate is set at every step.
        self.adam = torch.optim.AdamW(self._shards.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, **kind)
        for shard in self._shards.values():
            # As AdamW makes them at its first step; made now so that a checkpoint can be loaded into them.
            step = torch.zeros((), dtype=torch.float32, device=shard.device if implementation == "fused" else "cpu")
            self.adam.state[shard] = {"step": step} | {moment: torch.zeros_like(shard) for moment in MOMENTS}

    def step(self, lr: float, max_norm: float) -> Tensor:
        """Clips, updates and clears the gradients.

        Returns:
            The gradient norm before clipping over all parameters of the model, fp32 scalar.
        Raises:
            NonFiniteGradient: naming the first parameter and rank; nothing has been updated.
        """
        self._bind()
        grads = [shard.grad for shard in self._shards.values()]
        norms_P = torch.stack(torch._foreach_norm(grads)).float()
        counted_P = norms_P.new_tensor([self.plan[name].counted for name in self._shards], dtype=torch.bool)
        total = torch.where(counted_P, norms_P, 0).double().square().sum()
        dist.all_reduce(total)
        norm = total.sqrt().float()
        if not norm.isfinite():
            self._raise_non_finite(norms_P)
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for name, shard in self._shards.items():
            shard.grad = self.parameters[name].grad = None
        return norm

    def moments(self) -> Iterator[tuple[str, str, DTensor]]:
        """Every moment as (parameter name, moment name, DTensor placed like its parameter, sharing storage)."""
        for name, parameter in self.parameters.items():
            state = self.adam.state[self._shards[name]]
            for moment in MOMENTS:
                yield name, moment, _like(state[moment], parameter)

    def step_counts(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's update count, a 0-d fp32 tensor that may be written."""
        for name, shard in self._shards.items():
            yield name, self.adam.state[shard]["step"]

    def _bind(self) -> None:
        """Points the shards at the parameters' storage, which FSDP2 may have moved, and at this step's gradients.

        A parameter that no token reached has no gradient; zero takes its place, so that its moments decay as on every other rank.
        """
        for name, parameter in self.parameters.items():
            shard, grad = self._shards[name], parameter.grad
            shard.data = parameter.to_local().detach()
            shard.grad = torch.zeros_like(shard) if grad is None else grad.to_local()

    def _raise_non_finite(self, norms_P: Tensor) -> None:
        bad = [name for name, norm in zip(self._shards, norms_P.tolist(), strict=True) if not norm < float("inf")]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
        where = [f"{names[0]} on rank {rank} ({len(names)} parameters there)" for rank, names in enumerate(found) if names]
        raise NonFiniteGradient("gradient is not finite; first in " + "; ".join(where[:4]))


def _like(local: Tensor, parameter: DTensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
