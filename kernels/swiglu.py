"""SwiGLU with the routing weight inside: ``w * silu(gate) * up`` in one pass, and its gradient in another.

Applying the routing weight before the down projection means that no expert output has to be kept for the weight's
gradient (memory-efficient permutation, arXiv 2603.07685). The backward pass recomputes the activation, so the forward
saves the pre-activations alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op
from kernels.programs import programs


def _rows_of(weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight of each row, and whether it holds data, as columns."""
    present_R = torch.arange(pair_R.shape[0], device=pair_R.device) < num_rows
    weights_R = torch.where(present_R, weights_P[torch.where(present_R, pair_R, 0).long()], 0) if len(weights_P) else present_R
    return weights_R.to(wide)[:, None], present_R[:, None]


def weighted_swiglu_reference(gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Tensor:
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate_RF, up_RF = gate_up_R2F.to(wide).unbind(1)
    weights_R1, present_R1 = _rows_of(weights_P, pair_R, num_rows, wide)
    act_RF = torch.nn.functional.silu(gate_RF) * up_RF * weights_R1
    return torch.where(present_R1, act_RF, 0).to(gate_up_R2F.dtype)


def weighted_swiglu_backward_reference(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if first is not None:
        rows_R = torch.arange(len(pair_R), device=pair_R.device) + first
        gate_up_R2F = gate_up_R2F[rows_R.clamp(max=len(gate_up_R2F) - 1)]
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate_RF, up_RF = gate_up_R2F.to(wide).unbind(1)
    weights_R1, present_R1 = _rows_of(weights_P, pair_R, num_rows, wide)
    grad_RF = grad_RF.to(wide)
    sig_RF = torch.sigmoid(gate_RF)
    silu_RF = gate_RF * sig_RF
    grad_gate_RF = grad_RF * weights_R1 * up_RF * (sig_RF + silu_RF * (1 - sig_RF))
    grad_gate_up_R2F = torch.stack((grad_gate_RF, grad_RF * weights_R1 * silu_RF), dim=1)
    present_R = present_R1.squeeze(1)
    grad_weights_P = torch.zeros_like(weights_P)
    grad_weights_P[pair_R[present_R].long()] = (grad_RF * silu_RF * up_RF).sum(1)[present_R].to(weights_P.dtype)
    return (
        torch.where(present_R1[:, :, None], grad_gate_up_R2F, 0).to(gate_up_R2F.dtype),
        grad_weights_P,
        torch.where(present_R1, silu_RF * up_RF * weights_R1, 0).to(gate_up_R2F.dtype),
    )


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(gate_up_ptr, weight_ptr, pair_ptr, num_rows_ptr, act_ptr, F, R, BLOCK_F: tl.constexpr):
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        weight = tl.load(weight_ptr + tl.load(pair_ptr + row))
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            gate = tl.load(gate_up_ptr + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
            act = gate * tl.sigmoid(gate) * up * weight
            tl.store(act_ptr + row * F + f, act.to(act_ptr.dtype.element_ty), mask=f < F)


@triton.jit
def place_of_row(row, first_ptr, size):
    """Where the pre-activations of a row are: from another row on in a larger tensor, which rows may reach beyond."""
    if first_ptr is not None:
        row = tl.minimum(row + tl.load(first_ptr), size - 1)
    return row


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    grad_ptr,
    gate_up_ptr,
    weight_ptr,
    pair_ptr,
    num_rows_ptr,
    first_ptr,
    grad_gate_up_ptr,
    grad_weight_ptr,
    act_ptr,
    F,
    R,
    size,
    BLOCK_F: tl.constexpr,
):
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        place = place_of_row(row, first_ptr, size)
        pair = tl.load(pair_ptr + row)
        weight = tl.load(weight_ptr + pair)
        grad_weight = tl.zeros([BLOCK_F], dtype=tl.float32)
        for start in range(0, F, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            gate = tl.load(gate_up_ptr + place * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + place * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * F + f, mask=f < F, other=0.0).to(tl.float32)
            sig = tl.sigmoid(gate)
            silu = gate * sig
            grad_weight += grad * silu * up
            grad_gate = grad * weight * up * (sig + silu * (1 - sig))
            dtype = act_ptr.dtype.element_ty
            tl.store(grad_gate_up_ptr + row * 2 * F + f, grad_gate.to(dtype), mask=f < F)
            tl.store(grad_gate_up_ptr + row * 2 * F + F + f, (grad * weight * silu).to(dtype), mask=f < F)
            tl.store(act_ptr + row * F + f, (silu * up * weight).to(dtype), mask=f < F)
        tl.store(grad_weight_ptr + pair, tl.sum(grad_weight))


def _block(F: int, most: int) -> int:
    return min(triton.next_power_of_2(F), most)


def _launch_forward(gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Tensor:
    R, _, F = gate_up_R2F.shape
    act_RF = gate_up_R2F.new_empty(R, F)
    if act_RF.numel():
        _forward_kernel[programs(R, act_RF.device)](
            gate_up_R2F, weights_P, pair_R, num_rows, act_RF, F, R, BLOCK_F=_block(F, 1024), num_warps=2
        )
    return act_RF


def _launch_backward(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    (R, F), grad_RF = grad_RF.shape, grad_RF.contiguous()
    grad_gate_up_R2F, act_RF = gate_up_R2F.new_empty(R, 2, F), torch.empty_like(grad_RF)
    grad_weights_P = torch.zeros_like(weights_P)
    if R:
        _backward_kernel[programs(R, act_RF.device)](
            grad_RF, gate_up_R2F, weights_P, pair_R, num_rows, first, grad_gate_up_R2F, grad_weights_P, act_RF, F, R,
            len(gate_up_R2F), BLOCK_F=_block(F, 256), num_warps=2,
        )  # fmt: skip
    return grad_gate_up_R2F, grad_weights_P, act_RF


@op("weighted_swiglu")
def weighted_swiglu(gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Tensor:
    """``weights[pair] * silu(gate) * up``.

    Args:
        gate_up_R2F: [R, 2, F] contiguous; gate then up.
        weights_P: [P] routing weights, fp32; row r has the weight ``weights_P[pair_R[r]]``.
        pair_R: [R] integers in [0, P), each at most once, as far as rows hold data.
        num_rows: one-element integer tensor on the device: the rows that hold data.
    Returns:
        [R, F] in the dtype of ``gate_up_R2F``; computed in fp32; rows from ``num_rows`` on are unspecified.
    """
    if not gate_up_R2F.is_cuda or gate_up_R2F.dtype == torch.float64:
        return weighted_swiglu_reference(gate_up_R2F, weights_P, pair_R, num_rows)
    return _launch_forward(gate_up_R2F, weights_P, pair_R, num_rows)


@torch.library.register_fake(weighted_swiglu)
def _(gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Tensor:
    R, _, F = gate_up_R2F.shape
    return gate_up_R2F.new_empty(R, F)


@op("weighted_swiglu_backward")
def weighted_swiglu_backward(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of :func:`weighted_swiglu`, and the activation again for the down projection's weight gradient.

    Args:
        first: if given, ``gate_up_R2F`` has other rows too, and those of this call begin at this one (one-element int64 tensor on
            the device; :mod:`kernels.stash`). Where they reach beyond its end, results are unspecified.
    Returns:
        grad_gate_up [R, 2, F], grad_weights [P] (fp32, zero for pairs without a row), activation [R, F]; rows from
        ``num_rows`` on are unspecified.
    """
    arguments = grad_RF, gate_up_R2F, weights_P, pair_R, num_rows, first
    if not gate_up_R2F.is_cuda or gate_up_R2F.dtype == torch.float64:
        return weighted_swiglu_backward_reference(*arguments)
    return _launch_backward(*arguments)


@torch.library.register_fake(weighted_swiglu_backward)
def _(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    R, F = grad_RF.shape
    return gate_up_R2F.new_empty(R, 2, F), torch.empty_like(weights_P), torch.empty_like(grad_RF)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_RF: Tensor):
    grad_gate_up_R2F, grad_weights_P, _ = weighted_swiglu_backward(grad_RF, *ctx.saved_tensors)
    return grad_gate_up_R2F, grad_weights_P, None, None


torch.library.register_autograd(weighted_swiglu, _backward, setup_context=_setup_context)
