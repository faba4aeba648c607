"""Grouped matrix products of FP8 operands, as :mod:`kernels.grouped_mm` of bf16: ragged groups, offsets on the device.

Operands are those of :mod:`kernels.quantize` and :mod:`kernels.turn_rows`. Where a scale belongs to all that is summed over,
tensor cores keep the sums over a dimension of the model; with scales of 128 numbers each, or over rows, products of 128 numbers
are added up in fp32. The kernels are for Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ends import equal_ends, one_group
from kernels.op import op
from kernels.programs import multiprocessors
from kernels.quantize import BLOCK


def grouped_mm_fp8_reference(
    a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, blockwise: bool
) -> Tensor:
    a_RK, b_ENK = a_RK.float(), b_ENK.float()
    if blockwise:
        a_RK = a_RK * a_scale.t().repeat_interleave(BLOCK, 1)
        b_ENK = b_ENK * b_scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    else:
        a_RK, b_ENK = a_RK * a_scale[:, None], b_ENK * b_scale[:, :, None]
    out_RN = a_RK.new_zeros(len(a_RK), b_ENK.shape[1], dtype=torch.bfloat16)
    start = 0
    for b_NK, end in zip(b_ENK, offsets_E.tolist(), strict=True):
        out_RN[start:end] = a_RK[start:end] @ b_NK.t()
        start = end
    return out_RN


def grouped_mm_fp8_weight_grad_reference(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool
) -> Tensor:
    return _weight_grad_reference(grad_NW, grad_scale, a_KW, a_scale, ends_E, blockwise).bfloat16()


def _weight_grad_reference(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool
) -> Tensor:
    out_ENK = a_KW.new_empty(len(ends_E), len(grad_NW), len(a_KW), dtype=torch.float32)
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        grad, a = (
            x[:, start:end].float() * scale[start // BLOCK : end // BLOCK].t().repeat_interleave(BLOCK, -1)
            for x, scale in ((grad_NW, grad_scale), (a_KW, a_scale))
        )
        out_ENK[e] = grad @ a.t()
        start = end
    return out_ENK


@op("grouped_mm_fp8")
def _grouped_mm_fp8(a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, blockwise: bool) -> Tensor:
    if not a_RK.is_cuda:
        return grouped_mm_fp8_reference(a_RK, a_scale, b_ENK, b_scale, offsets_E, blockwise)
    from kernels.grouped_mm_launch import launch_grouped_mm, launch_grouped_mm_blockwise

    if blockwise:
        return launch_grouped_mm_blockwise(a_RK, a_scale, b_ENK, b_scale, offsets_E)
    return launch_grouped_mm(a_RK, b_ENK.transpose(1, 2), offsets_E, a_scale, b_scale)


@torch.library.register_fake(_grouped_mm_fp8)
def _(a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, blockwise: bool) -> Tensor:
    return a_RK.new_empty(len(a_RK), b_ENK.shape[1], dtype=torch.bfloat16)


@op("grouped_mm_fp8_weight_grad")
def _grouped_mm_fp8_weight_grad(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool
) -> Tensor:
    operands = grad_NW, grad_scale, a_KW, a_scale, ends_E
    if not a_KW.is_cuda:
        return grouped_mm_fp8_weight_grad_reference(*operands, blockwise)
    from kernels.grouped_mm_launch import launch_weight_grad_fp8

    return launch_weight_grad_fp8(*operands, blockwise)


@torch.library.register_fake(_grouped_mm_fp8_weight_grad)
def _(grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool) -> Tensor:
    return a_KW.new_empty(len(ends_E), len(grad_NW), len(a_KW), dtype=torch.bfloat16)


def grouped_mm_fp8(a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, blockwise: bool) -> Tensor:
    """``out[r] = a[r] @ b[e]^T`` for every row r of group e.

    Args:
        a_RK: [R, K] E4M3 with scales [R], blockwise [K / 128, R].
        b_ENK: [E, N, K] E4M3 with scales [E, N], blockwise [E, N / 128, K / 128]. K and N are multiples of 16, blockwise of 128.
        offsets_E: [E] int32, the end of each group.
    Returns:
        [R, N] bf16; rows past the last group are unspecified.
    """
    if not len(a_RK):
        return a_RK.new_empty(0, b_ENK.shape[1], dtype=torch.bfloat16)
    return _grouped_mm_fp8(a_RK, a_scale, b_ENK, b_scale, offsets_E, blockwise)


def grouped_mm_fp8_weight_grad(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool
) -> Tensor:
    """``out[e] = grad[:, columns of e] @ a[:, columns of e]^T``, [E, N, K] bf16.

    Args:
        grad_NW: [N, W] E4M3 with scales [W / 128], as of :func:`kernels.turn_rows.turn_rows`, blockwise [W / 128, N], as of
            :func:`kernels.quantize.quantize_columns`; N and K are multiples of 16, blockwise of 128.
        a_KW: [K, W], the same of the other operand.
        ends_E: [E] int32, the end of each group in W.
    """
    return _grouped_mm_fp8_weight_grad(grad_NW, grad_scale, a_KW, a_scale, ends_E, blockwise)


@op("mm_fp8_weight_grad")
def mm_fp8_weight_grad(grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, rows: int, blockwise: bool) -> Tensor:
    """:func:`grouped_mm_fp8_weight_grad` of a single group of so many rows, [N, K] bf16.

    Where tiles of the result are too few for all multiprocessors to be busy to the end, several compute a part of its sum each;
    what they come to, in bf16, is added up in fp32.
    """
    tiles = triton.cdiv(len(grad_NW), BLOCK) * triton.cdiv(len(a_KW), 2 * BLOCK)
    blocks = max(triton.cdiv(rows, BLOCK), 1)
    length = triton.cdiv(blocks, parts_of_sum(tiles, blocks, multiprocessors(a_KW.device)))
    ends_P = equal_ends(length * BLOCK, blocks * BLOCK, a_KW.device)
    parts_PNK = grouped_mm_fp8_weight_grad(grad_NW, grad_scale, a_KW, a_scale, ends_P, blockwise)
    if len(ends_P) == 1:
        return parts_PNK[0]
    return _launch_add_parts(parts_PNK) if parts_PNK.is_cuda else parts_PNK.sum(0)


@torch.library.register_fake(mm_fp8_weight_grad)
def _(grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, rows: int, blockwise: bool) -> Tensor:
    return a_KW.new_empty(len(grad_NW), len(a_KW), dtype=torch.bfloat16)


@op("mm_fp8_weight_grad_", mutates_args=("out_NK",))
def mm_fp8_weight_grad_(
    out_NK: Tensor, grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, rows: int, adds: bool
) -> None:
    """:func:`mm_fp8_weight_grad` as fp32, or unrounded added to it. ``grad_NW`` may be E5M2, and is not blockwise."""
    end = one_group(max(triton.cdiv(rows, BLOCK), 1) * BLOCK, a_KW.device)
    operands = grad_NW, grad_scale, a_KW, a_scale, end, False
    if not a_KW.is_cuda:
        grad_NK = _weight_grad_reference(*operands)[0]
        out_NK.copy_(out_NK + grad_NK if adds else grad_NK)
        return
    from kernels.grouped_mm_launch import launch_weight_grad_fp8

    launch_weight_grad_fp8(*operands, out_NK[None], adds)


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size + at, mask=at < size).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def _launch_add_parts(parts_PNK: Tensor) -> Tensor:
    """As ``sum(0)``, in a third of the time."""
    out_NK, block = torch.empty_like(parts_PNK[0]), 2048
    size = out_NK.numel()
    _add_parts_kernel[(triton.cdiv(size, block),)](parts_PNK, out_NK, size, PARTS=len(parts_PNK), BLOCK=block, num_warps=8)
    return out_NK


def parts_of_sum(tiles: int, blocks: int, programs: int) -> int:
    """How many parts of each tile's sum take the shortest time.

    It is counted in blocks of 0.8 us, by what an H200 takes for the end of a tile, and for the launches and bytes of adding up.
    """

    def blocks_of_time(parts: int) -> float:
        rounds, adding_up = triton.cdiv(tiles * parts, programs), 8 + 0.04 * tiles * parts
        return rounds * (triton.cdiv(blocks, parts) + 4) + adding_up * (parts > 1)

    return min(range(1, min(blocks, 8) + 1), key=blocks_of_time)
