"""Grouped matrix products over ragged groups of rows, with device-side offsets and no padding.

Group e holds the rows from ``offsets_E[e - 1]`` (0 for the first) to ``offsets_E[e]``; any group may be empty. Rows past
the last offset belong to no group: they are never read into a product, and what they hold afterwards is unspecified.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.grouped_mm_kernels import _copy_tails_kernel, _grouped_mm_kernel, _weight_grad_kernel


def grouped_mm_reference(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    out_RN = a_RK.new_zeros(a_RK.shape[0], b_EKN.shape[2])
    start = 0
    for b_KN, end in zip(b_EKN, offsets_E.tolist(), strict=True):
        torch.mm(a_RK[start:end], b_KN, out=out_RN[start:end])
        start = end
    return out_RN


def grouped_mm_weight_grad_reference(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    out_ENK = a_RK.new_empty(offsets_E.shape[0], grad_RN.shape[1], a_RK.shape[1])
    start = 0
    for out_NK, end in zip(out_ENK, offsets_E.tolist(), strict=True):
        torch.mm(grad_RN[start:end].t(), a_RK[start:end], out=out_NK)
        start = end
    return out_ENK


class Tile(NamedTuple):
    """How a Triton kernel cuts a product: rows, columns and depth of a tile, and how it runs on a multiprocessor."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int = 1


# The products (b is stored [E, N, K], K, N) for which the Triton kernel was measured to be faster than torch._grouped_mm, or as
# fast with a launch less, from a mean of 512 rows a group on (one H200, torch 2.11.0, triton 3.6.0).
_FASTER = {
    *((True, 2048, 1536), (True, 768, 2048), (False, 2048, 768), (False, 1536, 2048)),
    *((True, 2048, 2816), (True, 1408, 2048), (False, 2048, 1408), (False, 2816, 2048)),
    (False, 7168, 2048),
}
_TILE = Tile(128, 256, 64, 8, 3)
# The same of weight gradients (N, K), from a mean of 128 rows a group on.
_FASTER_WEIGHT_GRAD = {(1536, 2048), (2048, 768), (7168, 2048)}
_WEIGHT_GRAD_TILE = Tile(128, 256, 64, 8, 4)


def _programs(x: Tensor, tile: Tile) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count * tile.programs


def _launch_grouped_mm(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor, tile: Tile, programs: int) -> Tensor:
    (R, K), (E, _, N) = a_RK.shape, b_EKN.shape
    out_RN = a_RK.new_empty(R, N)
    stored_enk = b_EKN.stride(1) == 1
    # Storing half a tile at a time leaves more shared memory to the loads.
    halves = tile.m * tile.n > 128 * 128 or tile.programs > 1
    _grouped_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a_RK, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(b_EKN.transpose(1, 2), [1, tile.n, tile.k])
        if stored_enk
        else TensorDescriptor.from_tensor(b_EKN, [1, tile.k, tile.n]),
        TensorDescriptor.from_tensor(out_RN, [tile.m, tile.n // 2 if halves else tile.n]),
        out_RN, offsets_E, E, K, N,
        E_P=triton.next_power_of_2(E), B_IS_ENK=stored_enk, HALVES=halves,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_RN


@torch.library.custom_op("moe_titan::tiled_grouped_mm", mutates_args=())
def tiled_grouped_mm(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor, tile: list[int]) -> Tensor:
    """:func:`grouped_mm` as the Triton kernel with the given :class:`Tile`; rows and columns of a and b are whole 16 bytes."""
    if not a_RK.is_cuda:
        return grouped_mm_reference(a_RK, b_EKN, offsets_E)
    return _launch_grouped_mm(a_RK, b_EKN, offsets_E, Tile(*tile), _programs(a_RK, Tile(*tile)))


@tiled_grouped_mm.register_fake
def _(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor, tile: list[int]) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_EKN.shape[2])


def _launch_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor, tile: Tile, programs: int) -> Tensor:
    # Descriptors want the rows' numbers side by side.
    grad_RN, a_RK = grad_RN.contiguous(), a_RK.contiguous()
    N, K, E = grad_RN.shape[1], a_RK.shape[1], len(offsets_E)
    out_ENK = a_RK.new_empty(E, N, K)
    grad_tail_RN, a_tail_RK = (x.new_empty(E * tile.k, x.shape[1]) for x in (grad_RN, a_RK))
    _copy_tails_kernel[(E, triton.cdiv(N, 256) + triton.cdiv(K, 256))](
        grad_RN, a_RK, grad_tail_RN, a_tail_RK, offsets_E, N, K, BLOCK_R=tile.k, BLOCK_C=256
    )
    _weight_grad_kernel[(programs,)](
        *(TensorDescriptor.from_tensor(x, [tile.k, width]) for x, width in (
            (grad_RN, tile.m), (a_RK, tile.n), (grad_tail_RN, tile.m), (a_tail_RK, tile.n),
        )),
        TensorDescriptor.from_tensor(out_ENK, [1, tile.m, tile.n // 2]), offsets_E, E, N, K,
        E_P=triton.next_power_of_2(E), BLOCK_N=tile.m, BLOCK_K=tile.n, BLOCK_R=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_ENK


@torch.library.custom_op("moe_titan::tiled_grouped_mm_weight_grad", mutates_args=())
def tiled_grouped_mm_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor, tile: list[int]) -> Tensor:
    """:func:`grouped_mm_weight_grad` as two Triton kernels with the given :class:`Tile` of the [N, K] of a group.

    N and K are whole 16 bytes. While it runs, ``tile.k`` rows of grad and of a are kept for each group.
    """
    if not a_RK.is_cuda:
        return grouped_mm_weight_grad_reference(grad_RN, a_RK, offsets_E)
    return _launch_weight_grad(grad_RN, a_RK, offsets_E, Tile(*tile), _programs(a_RK, Tile(*tile)))


@tiled_grouped_mm_weight_grad.register_fake
def _(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor, tile: list[int]) -> Tensor:
    return a_RK.new_empty(offsets_E.shape[0], grad_RN.shape[1], a_RK.shape[1])


def _has_native_kernel(a: Tensor) -> bool:
    return a.is_cuda and a.dtype == torch.bfloat16


def grouped_mm(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """``out[r] = a[r] @ b[e]`` for every row r of group e.

    Args:
        a_RK: [R, K].
        b_EKN: [E, K, N], same dtype.
        offsets_E: [E] int32, the end of each group, on the same device.
    Returns:
        [R, N]. On CUDA in bf16 one kernel without a host sync, the faster one of ``torch._grouped_mm`` and
        :func:`tiled_grouped_mm` by a table of measured shapes; elsewhere a loop over the groups.
    """
    if not len(a_RK):
        return a_RK.new_empty(0, b_EKN.shape[2])
    if not _has_native_kernel(a_RK):
        return grouped_mm_reference(a_RK, b_EKN, offsets_E)
    E, K, N = b_EKN.shape
    if (b_EKN.stride(1) == 1, K, N) in _FASTER and len(a_RK) >= 512 * E:
        return tiled_grouped_mm(a_RK, b_EKN, offsets_E, list(_TILE))
    return torch._grouped_mm(a_RK, b_EKN, offs=offsets_E)


def grouped_mm_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    """``out[e] = grad[rows of e]^T @ a[rows of e]``: [E, N, K], zero for an empty group. Arguments as in :func:`grouped_mm`.

    On CUDA in bf16 two kernels without a host sync, the faster ones of ``torch._grouped_mm`` and
    :func:`tiled_grouped_mm_weight_grad` by a table of measured shapes; elsewhere a loop over the groups.
    """
    if not len(a_RK):
        return a_RK.new_zeros(len(offsets_E), grad_RN.shape[1], a_RK.shape[1])
    if not _has_native_kernel(a_RK):
        return grouped_mm_weight_grad_reference(grad_RN, a_RK, offsets_E)
    if (grad_RN.shape[1], a_RK.shape[1]) in _FASTER_WEIGHT_GRAD and len(a_RK) >= 128 * len(offsets_E):
        return tiled_grouped_mm_weight_grad(grad_RN, a_RK, offsets_E, list(_WEIGHT_GRAD_TILE))
    return torch._grouped_mm(grad_RN.t(), a_RK, offs=offsets_E)
