"""SwiGLU with the routing weight inside, as :mod:`kernels.swiglu`, whose results are quantised for the products that follow."""

import torch
import triton
from torch import Tensor

from kernels.op import op
from kernels.packed_tokens import PackedTokens, unpack_tokens
from kernels.programs import FEW, programs
from kernels.quantize import E4M3, blocks_of_row, empty_rows, quantize_rows_reference
from kernels.swiglu import weighted_swiglu_backward_reference, weighted_swiglu_reference
from kernels.swiglu_fp8_kernels import (
    _backward_kernel,
    _blockwise_forward_kernel,
    _rowwise_backward_kernel,
    _rowwise_forward_kernel,
)


def _warps(F: int) -> int:
    return 2 if F <= 1024 else 4


def _chunks(F: int) -> dict[str, int]:
    """How kernels with a scale a row go through it: the fastest of those tried for rows of 768, 1408 and 2048 on an H200."""
    chunk, warps = (256, 1) if F <= 1024 else (512, 4) if F <= 1536 else (1024, 2 if F <= 2048 else 8)
    return {"CHUNKS": triton.cdiv(F, chunk), "CHUNK": chunk, "num_warps": warps}


def _launch_forward(
    gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, blockwise: bool
) -> tuple[Tensor, Tensor]:
    R, _, F = gate_up_R2F.shape
    act_RF, scale = empty_rows(gate_up_R2F, R, F, blockwise)
    if R:
        kernel = _blockwise_forward_kernel if blockwise else _rowwise_forward_kernel
        options = {"BLOCKS": blocks_of_row(F), "num_warps": _warps(F)} if blockwise else _chunks(F)
        kernel[programs(R, act_RF.device)](gate_up_R2F, weights_P, pair_R, num_rows, act_RF, scale, F, R, **options)
    return act_RF, scale


def _kept(kept: Tensor, F: int) -> tuple[Tensor, Tensor | None]:
    """Numbers, or elements and the scales behind them."""
    return (kept.view(E4M3), kept.view(torch.float32)[:, F // 2 :]) if _packed(kept) else (kept, None)


def _launch_backward(
    grad_RF: Tensor,
    kept: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    num_rows: Tensor,
    blockwise: bool,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (R, F), grad_RF, (kept, kept_scale) = grad_RF.shape, grad_RF.contiguous(), _kept(kept, grad_RF.shape[1])
    grad_gate_up_R2F, act_RF, grad_weights_P = grad_RF.new_empty(R, 2, F), torch.empty_like(grad_RF), torch.zeros_like(weights_P)
    elements, scale = empty_rows(grad_RF, R, 2 * F, blockwise)
    if R:
        _backward_kernel[programs(R, act_RF.device, FEW)](
            grad_RF, kept, kept_scale, weights_P, pair_R, num_rows, first,
            grad_gate_up_R2F, elements, scale, grad_weights_P, act_RF, F, R, len(kept), kept.stride(0),
            BLOCKS=blocks_of_row(F), BLOCKWISE=blockwise, num_warps=_warps(F),
        )  # fmt: skip
    return grad_gate_up_R2F, elements, scale, grad_weights_P, act_RF


def _launch_rowwise_backward(
    grad_RF: Tensor, kept: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (R, F), grad_RF, (kept, kept_scale) = grad_RF.shape, grad_RF.contiguous(), _kept(kept, grad_RF.shape[1])
    (elements, scale), (act_RF, act_scale) = (empty_rows(grad_RF, R, width, False) for width in (2 * F, F))
    grad_weights_P = torch.zeros_like(weights_P)
    if R:
        _rowwise_backward_kernel[programs(R, act_RF.device)](
            grad_RF, kept, kept_scale, weights_P, pair_R, num_rows, first,
            elements, scale, grad_weights_P, act_RF, act_scale, F, R, len(kept), kept.stride(0), **_chunks(F),
        )  # fmt: skip
    return elements, scale, grad_weights_P, act_RF, act_scale


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
        return _launch_backward(*arguments)
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
    if grad_RF.is_cuda:
        return _launch_rowwise_backward(grad_RF, kept, weights_P, pair_R, num_rows, first)
    grad_gate_up_R2F, grad_weights_P, act_RF = _backward_reference(grad_RF, kept, weights_P, pair_R, num_rows, False, first)
    return *quantize_rows_reference(grad_gate_up_R2F.flatten(1), False), grad_weights_P, *quantize_rows_reference(act_RF, False)


@torch.library.register_fake(weighted_swiglu_rowwise_backward)
def _(
    grad_RF: Tensor, kept: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    R, F = grad_RF.shape
    return *empty_rows(grad_RF, R, 2 * F, False), torch.empty_like(weights_P), *empty_rows(grad_RF, R, F, False)
