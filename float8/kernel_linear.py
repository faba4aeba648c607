"""FP8 linear layers on Hopper: quantised by the experts' kernels, to which a weight is their only group.

"rowwise" has a scale for a row of an operand, "blockwise" one for 1 x 128 numbers of an activation and 128 x 128 of a weight
(arXiv 2412.19437), which torch's products do not know. Every operand is quantised by an op of its own, so that a compiler has an
activation that several layers share quantised once.
"""

import torch
from torch import Tensor, nn

from float8.scaled_products import rowwise_product, scaled_product
from float8.shards import on_shards
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.quantize import quantize_columns, quantize_rows, quantize_weights
from kernels.turn_rows import turn_scaled_rows


def _one_group(rows: Tensor) -> Tensor:
    return rows.new_full((1,), len(rows), dtype=torch.int32)


def _product(rows: tuple[Tensor, Tensor], w_NK: Tensor, blockwise: bool, transposed: bool) -> Tensor:
    weight_1NK, scale = quantize_weights(w_NK[None], blockwise, transposed)
    if blockwise:
        return grouped_mm_fp8(*rows, weight_1NK, scale, _one_group(rows[0]), True)
    return rowwise_product(*rows, weight_1NK[0], scale[0], w_NK.dtype, fast=True)


def _blockwise_weight_grad(grad_RN: Tensor, x_RK: Tensor) -> Tensor:
    ends = _one_group(x_RK)
    (grad_NW, grad_scale, _), columns = quantize_columns(grad_RN, ends, True), quantize_columns(x_RK, ends, True)
    return grouped_mm_fp8_weight_grad(grad_NW, grad_scale, *columns, True)[0]


def _rowwise_weight_grad(grad_RN: Tensor, grad_scale_R: Tensor, x_RK: Tensor, x_scale_R: Tensor) -> Tensor:
    """Of the elements of both; the gradient's take on the scales of both, relative to the largest product of two."""
    scale_R = grad_scale_R * x_scale_R
    largest = scale_R.amax()
    grad_NW, x_KW = turn_scaled_rows(grad_RN, scale_R / largest), turn_scaled_rows(x_RK, 1 / x_scale_R)
    return scaled_product(grad_NW, x_KW, largest, x_RK.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> Tensor:
        ctx.blockwise = blockwise
        rows = quantize_rows(x_RK, _one_group(x_RK), blockwise)
        ctx.save_for_backward(x_RK, w_NK, None if blockwise else rows[1])
        return _product(rows, w_NK, blockwise, False)

    @staticmethod
    def backward(ctx, grad_RN: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RK, w_NK, x_scale_R = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        rows = quantize_rows(grad_RN, _one_group(grad_RN), ctx.blockwise)
        if ctx.blockwise:
            grad_NK = _blockwise_weight_grad(grad_RN, x_RK)
        else:
            grad_NK = _rowwise_weight_grad(*rows, x_RK, x_scale_R)
        return _product(rows, w_NK, ctx.blockwise, True), grad_NK, None


class KernelLinear(nn.Linear):
    """Takes over the parameters of ``linear``, which has no bias. N and K are multiples of 16, blockwise of 128."""

    def __init__(self, linear: nn.Linear, blockwise: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.blockwise = linear.weight, blockwise

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._shard, input, self.weight)

    def _shard(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        return _Linear.apply(x.flatten(0, -2), weight_NK, self.blockwise).unflatten(0, x.shape[:-1])
