"""AdamW over this rank's shards, with one gradient norm over parameters of both meshes."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kernels.adamw import adamw_, adamw_reference_
from parallelisms.sharding_plan import ShardingPlan, like, local
from parallelisms.split_weights import Split, split_weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class NonFiniteGradient(RuntimeError):
    """A gradient holds NaN or infinity. The parameters are as before the step."""


class Update(NamedTuple):
    """What a step found on the device: the gradient ``norm`` before clipping over all parameters of the model and ``norms`` of
    this rank's shards by parameter, fp32 scalars; ``number`` counts the steps of this process."""

    norm: Tensor
    norms: dict[str, Tensor]
    number: int


class ShardedAdamW:
    """AdamW on this rank's shards of the parameters.

    The update is elementwise, so it needs no mesh: working on plain tensors lets it take parameters of all meshes alike, and
    spares the host the DTensor dispatch. Parameters outside of FSDP2, but for routers, are split into two
    halves (see :mod:`parallelisms.split_weights`), and this is the one place that sees them whole.

    Args:
        model: parallelised and initialised; gradients summed over the data ranks.
        plan: the model's sharding plan.
        param_dtype: what the model computes in.
        implementation: "fused" for one kernel a parameter, on a GPU; the others are plain PyTorch.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        *,
        param_dtype: torch.dtype,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        implementation: Literal["for-loop", "foreach", "fused"],
    ):
        self.plan = plan
        self._low = split_weights(model, plan, param_dtype)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        kind = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
        self.settings: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay} | kind
        self._update = adamw_ if implementation == "fused" else adamw_reference_
        self.state: dict[str, dict[str, Tensor]] = {}
        self.before_change: Callable[[], None] = lambda: None
        """Called before parameters or moments change on the device: somebody may still be copying them on another stream."""
        self._number = 0
        self.halted = torch.zeros((), dtype=torch.bool, device=local(next(iter(self.parameters.values()))).device)
        for name, parameter in self.parameters.items():
            shard = local(parameter).detach()
            whole = torch.float32 if name in self._low else shard.dtype
            moments = {moment: torch.zeros_like(shard, dtype=whole, memory_format=torch.contiguous_format) for moment in MOMENTS}
            self.state[name] = {"step": torch.zeros((), dtype=torch.float32)} | moments

    def expect(self, micro_batches: int) -> None:
        """Prepares for a step of so many backward passes: several add up in fp32, as they do under FSDP2."""
        for name in self._low:
            self.parameters[name].grad = None  # of a step that failed
            self.parameters[name].grad_dtype = torch.float32 if micro_batches > 1 else torch.bfloat16

    @torch.no_grad()
    def step(self, lr: float, max_norm: float) -> Update:
        """Clips, updates and clears the gradients, without waiting for the device.

        While ``halted`` is set there, as a norm that is not finite sets it, this step and all that follow change nothing, up to
        :meth:`take_back`.
        """
        grads = {name: self._gradient(parameter) for name, parameter in self.parameters.items()}
        norms = _norms(grads)
        # What is not counted here another rank counts.
        counted = [norm for name, norm in norms.items() if self.plan[name].counted] or [0 * next(iter(norms.values()))]
        total = torch.stack(counted).double().square().sum()
        dist.all_reduce(total)
        norm = total.sqrt().float()
        self.halted |= ~norm.isfinite()
        scale = torch.where(self.halted, torch.nan, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        beta1, beta2 = self.settings["betas"]
        self.before_change()
        for name, parameter in self.parameters.items():
            count, *moments = self.state[name].values()
            count += 1
            # FSDP2 may have moved the shards since.
            weight, low, grad = local(parameter), self._low.get(name), grads.pop(name)
            decay = self.settings["eps"], self.settings["weight_decay"]
            self._update(weight, low, grad, *moments, scale, lr, beta1, beta2, *decay, int(count))
            parameter.grad = None
        self._number += 1
        return Update(norm, norms, self._number)

    def take_back(self, update: Update) -> None:
        """For a step that was halted: takes it and those since out of the counts. What follows may change something again."""
        for _, count in self.step_counts():
            count -= self._number - update.number + 1
        self._number = update.number - 1
        self.halted.zero_()

    def refuse(self, update: Update) -> NoReturn:
        """Takes back a step whose norm is not finite. All ranks must call it together.

        Raises:
            NonFiniteGradient: naming the first parameter and rank.
        """
        self.take_back(update)
        bad = [name for name in self.parameters if not update.norms[name] < float("inf")]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
        where = [f"{names[0]} on rank {rank} ({len(names)} parameters there)" for rank, names in enumerate(found) if names]
        raise NonFiniteGradient("gradient is not finite; first in " + "; ".join(where[:4]))

    def masters(self) -> dict[str, Tensor | Split]:
        """Every parameter in its full precision, placed as in the model, sharing storage."""
        return {name: self._master(name, parameter.detach()) for name, parameter in self.parameters.items()}

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every moment as (parameter name, moment name, tensor placed like its parameter, sharing storage)."""
        for name, parameter in self.parameters.items():
            for moment in MOMENTS:
                yield name, moment, like(self.state[name][moment], parameter)

    def tensors(self, name: str) -> list[Tensor]:
        """All that this rank holds of a parameter, sharing storage: the weight, its lower halves if it is split, the moments."""
        low = self._low.get(name)
        moments = [self.state[name][moment] for moment in MOMENTS]
        return [local(self.parameters[name]).detach(), *([] if low is None else [low]), *moments]

    def step_counts(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's update count, a 0-d fp32 tensor that may be written."""
        for name, state in self.state.items():
            yield name, state["step"]

    def _master(self, name: str, parameter: Tensor) -> Tensor | Split:
        low = self._low.get(name)
        return parameter if low is None else Split(parameter, like(low, parameter))

    @staticmethod
    def _gradient(parameter: Tensor) -> Tensor:
        """This rank's shard of the gradient.

        A parameter that no token reached has none; zero takes its place, so that its moments decay as on every other rank.
        """
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(local(parameter))
        if isinstance(grad, DTensor):
            # Outside of FSDP2, tensor-parallel ranks have yet to sum up what each saw.
            grad = grad.redistribute(placements=parameter.placements).to_local()
        return grad


def _norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The 2-norm of each, an fp32 scalar (fp64 for fp64)."""
    norms: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        found = torch._foreach_norm(list(alike.values()), dtype=torch.promote_types(dtype, torch.float32))
        norms |= zip(alike, found, strict=True)
    return norms
