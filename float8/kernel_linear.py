"""FP8 linear layers on Hopper: quantised by the experts' kernels, to which a weight is their only group.

"rowwise" has a scale for a row of an operand, "blockwise" one for 1 x 128 numbers of an activation and 128 x 128 of a weight
(arXiv 2412.19437), which torch's products do not know. Every operand is quantised by an op of its own, so that a compiler has an
activation that several layers share quantised once.
"""

import torch
import triton
from torch import Tensor, nn

from float8.rowwise_product import rowwise_product
from float8.shards import on_shards
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.quantize import BLOCK, quantize_columns, quantize_rows, quantize_weights


def _one_group(rows: Tensor) -> Tensor:
    return rows.new_full((1,), len(rows), dtype=torch.int32)


def _product(x_RK: Tensor, w_NK: Tensor, blockwise: bool, transposed: bool) -> Tensor:
    ends = _one_group(x_RK)
    rows, (weight_1NK, scale) = quantize_rows(x_RK, ends, blockwise), quantize_weights(w_NK[None], blockwise, transposed)
    if blockwise:
        return grouped_mm_fp8(*rows, weight_1NK, scale, ends, True)
    return rowwise_product(*rows, weight_1NK[0], scale[0], x_RK.dtype, fast=True)


def _weight_grad(grad_RN: Tensor, x_RK: Tensor, blockwise: bool) -> Tensor:
    ends = _one_group(x_RK)
    (grad_NW, grad_scale, _), columns = quantize_columns(grad_RN, ends, blockwise), quantize_columns(x_RK, ends, blockwise)
    if blockwise:
        return grouped_mm_fp8_weight_grad(grad_NW, grad_scale, *columns, True)[0]
    width, (x_KW, x_scale, _) = triton.cdiv(len(x_RK), BLOCK) * BLOCK, columns
    return rowwise_product(grad_NW[:, :width], grad_scale[0], x_KW[:, :width], x_scale[0], x_RK.dtype, fast=False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> Tensor:
        ctx.blockwise = blockwise
        ctx.save_for_backward(x_RK, w_NK)
        return _product(x_RK, w_NK, blockwise, False)

    @staticmethod
    def backward(ctx, grad_RN: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RK, w_NK = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        return _product(grad_RN, w_NK, ctx.blockwise, True), _weight_grad(grad_RN, x_RK, ctx.blockwise), None


class KernelLinear(nn.Linear):
    """Takes over the parameters of ``linear``, which has no bias. N and K are multiples of 16, blockwise of 128."""

    def __init__(self, linear: nn.Linear, blockwise: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.blockwise = linear.weight, blockwise

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._shard, input, self.weight)

    def _shard(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        return _Linear.apply(x.flatten(0, -2), weight_NK, self.blockwise).unflatten(0, x.shape[:-1])
