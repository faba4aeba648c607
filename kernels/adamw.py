"""AdamW in one pass over the memory, with clipping inside, for fp32 parameters and for those kept as two 16-bit halves.

A split parameter is a bf16 tensor, which the model computes with, and an int16 tensor that holds what bf16 lacks of the fp32
number: together its 32 bits. So there is no second copy of the weights, and nothing to cast between steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op

_NAN = 0x7FC00000


def split_fp32(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the nearest bf16 (ties away from zero) and the distance to it in units of fp32's last place, int16."""
    # Any other NaN might round to a number.
    bits = torch.where(x.isnan(), _NAN, x.contiguous().view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_fp32(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 tensor that :func:`split_fp32` was given, bit for bit but for the kind of a NaN."""
    return ((high.contiguous().view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def adamw_reference_(
    weight: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    if scale.isnan():
        return
    wide = torch.promote_types(weight.dtype, torch.float32)
    master = weight.to(wide) if low is None else join_fp32(weight, low)
    grad, mean, square = grad.to(wide) * scale, exp_avg.to(wide), exp_avg_sq.to(wide)
    mean = mean.lerp(grad, 1 - beta1)
    square = (beta2 * square).addcmul_(grad, grad, value=1 - beta2)
    denominator = (square / (1 - beta2**step)).sqrt_().add_(eps)
    master = (master * (1 - lr * weight_decay)).addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    if low is None:
        weight.copy_(master)
    else:
        for half, value in zip((weight, low), split_fp32(master), strict=True):
            half.copy_(value)


@triton.jit
def _adamw_kernel(
    weight_ptr, low_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, scale_ptr,
    N, decay, step_size, beta1, beta2, correction2, eps, SPLIT: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    mask = n < tl.where(scale == scale, N, 0)
    if SPLIT:
        high = tl.load(weight_ptr + n, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(low_ptr + n, mask=mask, other=0).to(tl.int32)
        weight = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(weight_ptr + n, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + n, mask=mask, other=0.0).to(tl.float32) * scale
    exp_avg = tl.load(exp_avg_ptr + n, mask=mask, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + n, mask=mask, other=0.0).to(tl.float32)
    exp_avg += (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    weight = decay * weight - step_size * exp_avg / (tl.sqrt(exp_avg_sq / correction2) + eps)
    tl.store(exp_avg_ptr + n, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + n, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    if SPLIT:
        bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), NAN)
        high = (bits + 0x8000) >> 16
        tl.store(weight_ptr + n, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low_ptr + n, (bits - (high << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(weight_ptr + n, weight.to(weight_ptr.dtype.element_ty), mask=mask)


def _launch(
    weight: Tensor, low: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scale: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    if N := weight.numel():
        block = 1024  # four elements a thread, which all dtypes load alike
        _adamw_kernel[(triton.cdiv(N, block),)](
            weight, low, grad, exp_avg, exp_avg_sq, scale,
            N, 1 - lr * weight_decay, lr / (1 - beta1**step), beta1, beta2, 1 - beta2**step, eps,
            SPLIT=low is not None, NAN=_NAN, BLOCK=block, num_warps=8,
        )  # fmt: skip


@op("adamw_", mutates_args=("weight", "low", "exp_avg", "exp_avg_sq"))
def adamw_(
    weight: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scale: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step of AdamW (arXiv 1711.05101), in place, for the gradient ``grad * scale``.

    Args:
        weight: any floating dtype, or bf16 with ``low``; the arithmetic is at least fp32. Contiguous, like everything elementwise
            beside it.
        low: int16, the lower halves of the fp32 numbers whose upper ones ``weight`` holds.
        grad: any floating dtype.
        exp_avg, exp_avg_sq: moments in the dtype of the whole weight.
        scale: one-element fp32 tensor on the device; NaN leaves everything as it is.
        step: how many steps this one makes, from 1.
    """
    launches = weight.is_cuda and weight.dtype != torch.float64
    update = _launch if launches else adamw_reference_
    update(weight, low, grad.contiguous(), exp_avg, exp_avg_sq, scale, lr, beta1, beta2, eps, weight_decay, step)
