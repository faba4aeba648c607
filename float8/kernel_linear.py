"""FP8 linear layers in the experts' kernels, of which a weight is the only group.

"rowwise" has a scale for a row of an operand, "blockwise" one for 1 x 128 numbers of an activation and 128 x 128 of a weight
(arXiv 2412.19437). Products are whole ops: nothing of them is fused with its surroundings.
"""

import torch
from torch import Tensor, nn

from float8.shards import on_shards
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.quantize import quantize_columns, quantize_rows, quantize_weights


def _one_group(rows: Tensor) -> Tensor:
    return rows.new_full((1,), len(rows), dtype=torch.int32)


def _product(x_RK: Tensor, w_NK: Tensor, ends: Tensor, blockwise: bool, transposed: bool) -> Tensor:
    rows, weight = quantize_rows(x_RK, ends, blockwise), quantize_weights(w_NK[None], blockwise, transposed)
    return grouped_mm_fp8(*rows, *weight, ends, blockwise)


@torch.library.custom_op("moe_titan::fp8_linear", mutates_args=())
def fp8_linear(x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> Tensor:
    """``x @ w^T`` [R, N] bf16 of operands that are quantised; N and K are multiples of 16, blockwise of 128."""
    return _product(x_RK, w_NK, _one_group(x_RK), blockwise, False)


@fp8_linear.register_fake
def _(x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> Tensor:
    return x_RK.new_empty(len(x_RK), len(w_NK), dtype=torch.bfloat16)


@torch.library.custom_op("moe_titan::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(grad_RN: Tensor, x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x [R, K] and w [N, K], bf16."""
    ends = _one_group(grad_RN)
    columns = quantize_columns(grad_RN, ends, blockwise)[:2], quantize_columns(x_RK, ends, blockwise)
    grad_w_1NK = grouped_mm_fp8_weight_grad(*columns[0], *columns[1], blockwise)
    return _product(grad_RN, w_NK, ends, blockwise, True), grad_w_1NK[0]


@fp8_linear_backward.register_fake
def _(grad_RN: Tensor, x_RK: Tensor, w_NK: Tensor, blockwise: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RK, dtype=torch.bfloat16), torch.empty_like(w_NK, dtype=torch.bfloat16)


def _setup_context(ctx, inputs, output) -> None:
    x_RK, w_NK, ctx.blockwise = inputs
    ctx.save_for_backward(x_RK, w_NK)


def _backward(ctx, grad_RN: Tensor) -> tuple[Tensor, Tensor, None]:
    return *fp8_linear_backward(grad_RN.contiguous(), *ctx.saved_tensors, ctx.blockwise), None


fp8_linear.register_autograd(_backward, setup_context=_setup_context)


class KernelLinear(nn.Linear):
    """Takes over the parameters of ``linear``, which has no bias."""

    def __init__(self, linear: nn.Linear, blockwise: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.blockwise = linear.weight, blockwise

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._product, input, self.weight)

    def _product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        return fp8_linear(x.flatten(0, -2), weight_NK, self.blockwise).unflatten(0, x.shape[:-1])
