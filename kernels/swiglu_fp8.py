"""SwiGLU with the routing weight inside, as :mod:`kernels.swiglu`, whose results are quantised for the products that follow."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op
from kernels.packed_tokens import PackedTokens, unpack_tokens
from kernels.programs import FEW, programs
from kernels.quantize import E4M3, blocks_of_row, empty_rows, quantize_rows_reference
from kernels.quantize_kernels import factor_of, places, row_bits, store_scales
from kernels.swiglu import place_of_row, weighted_swiglu_backward_reference, weighted_swiglu_reference


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(
    gate_up_ptr, weight_ptr, pair_ptr, num_rows_ptr, act_ptr, scale_ptr, F, R,
    BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        weight = tl.load(weight_ptr + tl.load(pair_ptr + row))
        f_BC = places(BLOCKS)
        dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
        gate_BC = tl.load(gate_up_ptr + row * 2 * F + f_BC, mask=f_BC < F, other=0.0).to(tl.float32)
        up_BC = tl.load(gate_up_ptr + row * 2 * F + F + f_BC, mask=f_BC < F, other=0.0).to(tl.float32)
        act_BC = (gate_BC * tl.sigmoid(gate_BC) * up_BC * weight).to(dtype).to(tl.float32)
        factor_B = factor_of(row_bits(act_BC, BLOCKWISE), not BLOCKWISE)
        tl.store(act_ptr + row * F + f_BC, (act_BC * factor_B[:, None]).to(tl.float8e4nv), mask=f_BC < F)
        store_scales(factor_B, scale_ptr + row, R, F // 128, True, BLOCKWISE)


@triton.jit
def _load_scales(scale_ptr, half, F, BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr):
    """Of the blocks in half a row, or the whole row's one."""
    if BLOCKWISE:
        b_B = tl.arange(0, BLOCKS)
        return tl.load(scale_ptr + half * (F // 128) + b_B, mask=b_B * 128 < F, other=0.0)[:, None]
    else:
        return tl.load(scale_ptr)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    grad_ptr, gate_up_ptr, kept_scale_ptr, weight_ptr, pair_ptr, num_rows_ptr, first_ptr,
    grad_gate_up_ptr, elements_ptr, scale_ptr, grad_weight_ptr, act_ptr, act_scale_ptr, F, R, size, stride,
    BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """The pre-activations are numbers, or E4M3 elements and their scales in rows of ``stride`` bytes.

    With ``act_scale_ptr`` the activation comes out as E4M3, else as numbers, as the gradient does beside its elements.
    """
    for row in tl.range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0), num_stages=3):
        row = tl.cast(row, tl.int64)
        pair = tl.load(pair_ptr + row)
        weight = tl.load(weight_ptr + pair)
        f_BC = places(BLOCKS)
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        mask_BC, gate_at, up_at = f_BC < F, row * 2 * F + f_BC, row * 2 * F + F + f_BC
        place = place_of_row(row, first_ptr, size)
        gate_BC = tl.load(gate_up_ptr + place * stride + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        up_BC = tl.load(gate_up_ptr + place * stride + F + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        if kept_scale_ptr is not None:
            kept_scales_ptr = kept_scale_ptr + place * (stride // 4)
            gate_BC = (gate_BC * _load_scales(kept_scales_ptr, 0, F, BLOCKS, BLOCKWISE)).to(dtype).to(tl.float32)
            up_BC = (up_BC * _load_scales(kept_scales_ptr, 1, F, BLOCKS, BLOCKWISE)).to(dtype).to(tl.float32)
        grad_BC = tl.load(grad_ptr + row * F + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        sig_BC = tl.sigmoid(gate_BC)
        silu_BC = gate_BC * sig_BC
        tl.store(grad_weight_ptr + pair, tl.sum(grad_BC * silu_BC * up_BC))
        act_BC = (silu_BC * up_BC * weight).to(dtype)
        grad_gate_BC = (grad_BC * weight * up_BC * (sig_BC + silu_BC * (1 - sig_BC))).to(dtype)
        grad_up_BC = (grad_BC * weight * silu_BC).to(dtype)
        if act_scale_ptr is None:
            tl.store(act_ptr + row * F + f_BC, act_BC, mask=mask_BC)
            tl.store(grad_gate_up_ptr + gate_at, grad_gate_BC, mask=mask_BC)
            tl.store(grad_gate_up_ptr + up_at, grad_up_BC, mask=mask_BC)
        else:
            factor_B = factor_of(row_bits(act_BC.to(tl.float32), BLOCKWISE), not BLOCKWISE)
            tl.store(act_ptr + row * F + f_BC, (act_BC.to(tl.float32) * factor_B[:, None]).to(tl.float8e4nv), mask=mask_BC)
            store_scales(factor_B, act_scale_ptr + row, R, F // 128, True, BLOCKWISE)
        # Both gradients are one operand.
        bits_gate_B = row_bits(grad_gate_BC.to(tl.float32), BLOCKWISE)
        bits_up_B = row_bits(grad_up_BC.to(tl.float32), BLOCKWISE)
        if not BLOCKWISE:
            bits_gate_B = tl.maximum(bits_gate_B, bits_up_B)
            bits_up_B = bits_gate_B
        factor_gate_B, factor_up_B = factor_of(bits_gate_B, not BLOCKWISE), factor_of(bits_up_B, not BLOCKWISE)
        tl.store(elements_ptr + gate_at, (grad_gate_BC.to(tl.float32) * factor_gate_B[:, None]).to(tl.float8e4nv), mask=mask_BC)
        tl.store(elements_ptr + up_at, (grad_up_BC.to(tl.float32) * factor_up_B[:, None]).to(tl.float8e4nv), mask=mask_BC)
        store_scales(factor_gate_B, scale_ptr + row, R, F // 128, True, BLOCKWISE)
        if BLOCKWISE:
            store_scales(factor_up_B, scale_ptr + F // 128 * R + row, R, F // 128, True, BLOCKWISE)


def _warps(F: int) -> int:
    return 2 if F <= 1024 else 4


def _launch_forward(
    gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, blockwise: bool
) -> tuple[Tensor, Tensor]:
    R, _, F = gate_up_R2F.shape
    act_RF, scale = empty_rows(gate_up_R2F, R, F, blockwise)
    if R:
        _forward_kernel[programs(R, act_RF.device)](
            gate_up_R2F, weights_P, pair_R, num_rows, act_RF, scale, F, R,
            BLOCKS=blocks_of_row(F), BLOCKWISE=blockwise, num_warps=_warps(F),
        )  # fmt: skip
    return act_RF, scale


def _launch_backward(
    grad_RF: Tensor,
    kept: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    num_rows: Tensor,
    blockwise: bool,
    first: Tensor | None = None,
    high_precision: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradient of the pre-activations, its elements and scales, that of the weights, activation and its scales; without
    ``high_precision`` the first is None and the activation of E4M3, else it has no scales."""
    (R, F), grad_RF = grad_RF.shape, grad_RF.contiguous()
    grad_gate_up_R2F = grad_RF.new_empty(R, 2, F) if high_precision else None
    act_RF, act_scale = (torch.empty_like(grad_RF), None) if high_precision else empty_rows(grad_RF, R, F, blockwise)
    elements, scale = empty_rows(grad_RF, R, 2 * F, blockwise)
    grad_weights_P, kept_scale = torch.zeros_like(weights_P), None
    if _packed(kept):
        kept, kept_scale = kept.view(E4M3), kept.view(torch.float32)[:, F // 2 :]
    if R:
        _backward_kernel[programs(R, act_RF.device, FEW)](
            grad_RF, kept, kept_scale, weights_P, pair_R, num_rows, first,
            grad_gate_up_R2F, elements, scale, grad_weights_P, act_RF, act_scale, F, R, len(kept), kept.stride(0),
            BLOCKS=blocks_of_row(F), BLOCKWISE=blockwise, num_warps=_warps(F),
        )  # fmt: skip
    return grad_gate_up_R2F, elements, scale, grad_weights_P, act_RF, act_scale


@op("weighted_swiglu_fp8")
def weighted_swiglu_fp8(
    gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, blockwise: bool
) -> tuple[Tensor, Tensor]:
    """:func:`kernels.swiglu.weighted_swiglu`, rounded to the dtype of its input (bf16 or fp32) and quantised.

    Returns:
        Elements [R, F] and scales as of :func:`kernels.quantize.quantize_rows`.
    """
    if gate_up_R2F.is_cuda:
        return _launch_forward(gate_up_R2F, weights_P, pair_R, num_rows, blockwise)
    return quantize_rows_reference(weighted_swiglu_reference(gate_up_R2F, weights_P, pair_R, num_rows), blockwise)


@torch.library.register_fake(weighted_swiglu_fp8)
def _(gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, blockwise: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(gate_up_R2F, len(gate_up_R2F), gate_up_R2F.shape[2], blockwise)


def _packed(kept: Tensor) -> bool:
    return kept.dtype == torch.int32


def _backward_reference(
    grad_RF: Tensor,
    kept: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    num_rows: Tensor,
    blockwise: bool,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _packed(kept):
        F = grad_RF.shape[1]
        kept = unpack_tokens(PackedTokens(kept, 2 * F, blockwise)).to(grad_RF.dtype).unflatten(1, (2, F))
    return weighted_swiglu_backward_reference(grad_RF, kept, weights_P, pair_R, num_rows, first)


@op("weighted_swiglu_fp8_backward")
def weighted_swiglu_fp8_backward(
    grad_RF: Tensor,
    kept: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    num_rows: Tensor,
    blockwise: bool,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`kernels.swiglu.weighted_swiglu_backward` with the gradient of the pre-activations quantised beside.

    Args:
        kept: pre-activations [R, 2, F], or their rows of 2 F packed by :func:`kernels.packed_tokens.pack_tokens`.
    Returns:
        grad_gate_up [R, 2, F]; its elements [R, 2 F] and scales as of :func:`kernels.quantize.quantize_rows`; grad_weights [P];
        activation [R, F].
    """
    arguments = grad_RF, kept, weights_P, pair_R, num_rows, blockwise, first
    if grad_RF.is_cuda:
        return _launch_backward(*arguments)[:5]
    grad_gate_up_R2F, grad_weights_P, act_RF = _backward_reference(*arguments)
    return grad_gate_up_R2F, *quantize_rows_reference(grad_gate_up_R2F.flatten(1), blockwise), grad_weights_P, act_RF


@torch.library.register_fake(weighted_swiglu_fp8_backward)
def _(
    grad_RF: Tensor,
    kept: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    num_rows: Tensor,
    blockwise: bool,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    R, F = grad_RF.shape
    quantized = empty_rows(grad_RF, R, 2 * F, blockwise)
    return grad_RF.new_empty(R, 2, F), *quantized, torch.empty_like(weights_P), torch.empty_like(grad_RF)


@op("weighted_swiglu_rowwise_backward")
def weighted_swiglu_rowwise_backward(
    grad_RF: Tensor, kept: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`weighted_swiglu_fp8_backward` with a scale a row, which makes nothing but what is quantised.

    Returns:
        Elements of grad_gate_up [R, 2 F] and scales [R]; grad_weights [P]; elements of the activation [R, F] and scales [R].
    """
    arguments = grad_RF, kept, weights_P, pair_R, num_rows, False, first
    if grad_RF.is_cuda:
        return _launch_backward(*arguments, high_precision=False)[1:]
    grad_gate_up_R2F, grad_weights_P, act_RF = _backward_reference(*arguments)
    return *quantize_rows_reference(grad_gate_up_R2F.flatten(1), False), grad_weights_P, *quantize_rows_reference(act_RF, False)


@torch.library.register_fake(weighted_swiglu_rowwise_backward)
def _(
    grad_RF: Tensor, kept: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    R, F = grad_RF.shape
    return *empty_rows(grad_RF, R, 2 * F, False), torch.empty_like(weights_P), *empty_rows(grad_RF, R, F, False)
