"""Weights that FSDP2 gathers in FP8: each rank quantises its part and sends it, and products use what arrives as it is.

FSDP2 asks a shard what to send and what to make of it if it has two methods, its all-gather extensions. They are set on the
shards' own tensors: parameters, optimizer and checkpoints know nothing of it. Elements travel as bytes, which every backend
sends.
Weights are rounded to bf16 first, as everywhere, so that results are those of weights gathered in bf16, bit for bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.quantize import E4M3, quantize_tiles


class TiledWeight(Tensor):
    """Weights of experts [E, .., K] that look like bf16 and are E4M3 elements [E, N, K] with a scale for each 128 x 128."""

    elements: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor, scale: Tensor, shape: torch.Size) -> "TiledWeight":
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=elements.device)
        weight.elements, weight.scale = elements, scale
        return weight

    def operand(self, transposed: bool) -> tuple[Tensor, Tensor]:
        """As of :func:`kernels.quantize.quantize_weights`, blockwise."""
        elements, scale = self.elements, self.scale
        if transposed:
            elements, scale = elements.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
        return elements.view(E4M3), scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in _VIEWS:
            raise NotImplementedError(f"{func} of a weight that was gathered in FP8")
        shape = func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {})).shape
        return cls(args[0].elements, args[0].scale, shape)


_aten = torch.ops.aten
_VIEWS = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default, _aten.as_strided.default)


class TileGather:
    """Of a shard of whole experts [e, .., K] whose matrices [N, K] have whole tiles."""

    def __init__(self, shard: Tensor):
        self.shard_e_K = shard

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, Tensor], None]:
        elements_eNK, scale = quantize_tiles(self.shard_e_K.bfloat16().flatten(1, -2), False)
        return (elements_eNK.view(torch.uint8), scale), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # A weight that is there already reads the memory that was gathered into.
        return (TiledWeight(*gathered, gathered[0].shape), gathered) if out is None else None


class TensorGather:
    """Of a shard of a linear layer with one scale for all of its weight, which :class:`Scales` sets."""

    scale: Tensor

    def __init__(self, shard: Tensor, mm_config: Any):
        self.shard, self.mm_config = shard, mm_config

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], Tensor]:
        elements = (self.shard.bfloat16().float() * self.scale).clamp(-448, 448).to(E4M3)
        return (elements.view(torch.uint8),), self.scale

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scale: Tensor, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole  # slow to import

        if out is not None:
            getattr(out, "_local_tensor", out)._scale = scale
            return None
        elements = gathered[0].view(E4M3)
        weight = Float8TrainingTensor(elements, scale, param_dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return weight, (elements,)


class Scales:
    """Scales of all weights with one each, from one reduction over the ranks that share them."""

    def __init__(self, gathers: list[TensorGather], group: ProcessGroup):
        self.gathers, self.group = gathers, group

    @torch.no_grad()
    def update(self) -> None:
        """Called whenever weights have changed."""
        amax_N = torch.stack(torch._foreach_norm([gather.shard for gather in self.gathers], torch.inf)).bfloat16().double()
        dist.all_reduce(amax_N, dist.ReduceOp.MAX, group=self.group)
        for gather, scale in zip(self.gathers, (448.0 / amax_N.clamp(min=1e-12)).float(), strict=True):
            gather.scale = scale
