"""FP8 linear layers on Hopper: quantised by the experts' kernels, to which a weight is their only group.

"rowwise" has a scale for a row of an operand, "blockwise" one for 1 x 128 numbers of an activation and 128 x 128 of a weight
(arXiv 2412.19437), which torch's products do not know. Every operand is quantised by an op of its own, so that a compiler has an
activation that several layers share quantised once.
"""

import torch
from torch import Tensor, nn

from float8.rowwise_product import rowwise_product
from float8.shards import on_shards
from kernels.grouped_mm_fp8 import grouped_mm_fp8, mm_fp8_weight_grad
from kernels.quantize import quantize_columns, quantize_rows, quantize_weights
from kernels.turn_rows import turn_rows


def _product(rows: tuple[Tensor, Tensor], w_NK: Tensor, blockwise: bool, transposed: bool) -> Tensor:
    weight_1NK, scale = quantize_weights(w_NK[None], blockwise, transposed)
    if blockwise:
        ends = w_NK.new_full((1,), len(rows[0]), dtype=torch.int32)
        return grouped_mm_fp8(*rows, weight_1NK, scale, ends, True)
    return rowwise_product(*rows, weight_1NK[0], scale[0], w_NK.dtype, fast=True)


class _Linear(torch.autograd.Function):
    """Blockwise operands of the weight gradient are quantised anew, as columns; rowwise ones are the rows, turned. Of the input,
    which is likely kept for something else, backward then gets the scales alone."""

    @staticmethod
    def forward(ctx, x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> Tensor:
        ctx.blockwise = blockwise
        rows = quantize_rows(x_RK, None, blockwise)
        ctx.save_for_backward(x_RK, w_NK, None if blockwise else rows[1])
        return _product(rows, w_NK, blockwise, False)

    @staticmethod
    def backward(ctx, grad_RN: Tensor) -> tuple[Tensor, Tensor, None]:
        (x_RK, w_NK, x_scale_R), blockwise = ctx.saved_tensors, ctx.blockwise
        grad_RN = grad_RN.contiguous()
        rows = quantize_rows(grad_RN, None, blockwise)
        if blockwise:
            columns = [quantize_columns(operand, None, True) for operand in (grad_RN, x_RK)]
        else:
            columns = [turn_rows(*operand, None) for operand in (rows, (x_RK, x_scale_R))]
        (grad_NW, grad_scale, _), (x_KW, x_scale, _) = columns
        grad_NK = mm_fp8_weight_grad(grad_NW, grad_scale, x_KW, x_scale, len(x_RK), blockwise)
        return _product(rows, w_NK, blockwise, True), grad_NK, None


class KernelLinear(nn.Linear):
    """Takes over the parameters of ``linear``, which has no bias. N and K are multiples of 16, blockwise of 128. For
    bf16, in which the weight's gradient comes out whatever goes in."""

    def __init__(self, linear: nn.Linear, blockwise: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.blockwise = linear.weight, blockwise

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._shard, input, self.weight)

    def _shard(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        return _Linear.apply(x.flatten(0, -2), weight_NK, self.blockwise).unflatten(0, x.shape[:-1])
