"""Parameters that no other rank shares a part of: computed with in bf16 where they lie, without FSDP2's copies and casts."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.adamw import join_fp32, split_fp32
from parallelisms.sharding_plan import ShardingPlan, like, local, logical_tensors


class Split(NamedTuple):
    """An fp32 tensor as two halves that lie alike: ``high`` bf16, ``low`` int16 (see :func:`kernels.adamw.split_fp32`)."""

    high: Tensor
    low: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.high.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def join(self) -> Tensor:
        """This rank's shard, a copy."""
        return join_fp32(local(self.high), local(self.low))

    def logical(self, name: str) -> "Iterator[tuple[str, Split]]":
        """See :func:`parallelisms.sharding_plan.logical_tensors`."""
        for (logical, high), (_, low) in zip(logical_tensors(name, self.high), logical_tensors(name, self.low), strict=True):
            yield logical, Split(high, low)


@torch.no_grad()
def split_weights(model: nn.Module, plan: ShardingPlan, param_dtype: torch.dtype) -> dict[str, Tensor]:
    """Replaces fp32 parameters that FSDP2 does not hold by bf16 ones, in place.

    Args:
        model: parallelised and initialised.
    Returns:
        By name, the int16 local tensors that complete them to fp32 (see :func:`kernels.adamw.split_fp32`). Empty unless
        ``param_dtype`` is bf16. Routers compute in fp32 and stay whole.
    """
    if param_dtype != torch.bfloat16:
        return {}
    lows: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if plan[name].split and parameter.dtype == torch.float32:
            high, lows[name] = split_fp32(local(parameter))
            # In place, so that tied parameters stay tied, and FSDP2 and hooks keep what they hold.
            torch.utils.swap_tensors(parameter, nn.Parameter(like(high, parameter)))
    return lows
