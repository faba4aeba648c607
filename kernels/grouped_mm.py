"""Grouped matrix products over ragged groups of rows, with device-side offsets and no padding.

Group e holds the rows from ``offsets_E[e - 1]`` (0 for the first) to ``offsets_E[e]``; any group may be empty. Rows past
the last offset belong to no group: they are never read into a product, and what they hold afterwards is unspecified.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.grouped_mm_kernels import _grouped_mm_kernel


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
    """How the Triton kernel cuts a product: rows, columns and depth of a tile, and how it runs on a multiprocessor."""

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
    processors = torch.cuda.get_device_properties(a_RK.device).multi_processor_count
    return _launch_grouped_mm(a_RK, b_EKN, offsets_E, Tile(*tile), processors * tile[-1])


@tiled_grouped_mm.register_fake
def _(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor, tile: list[int]) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_EKN.shape[2])


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
    """``out[e] = grad[rows of e]^T @ a[rows of e]``: [E, N, K], zero for an empty group. Arguments as in :func:`grouped_mm`."""
    if not len(a_RK):
        return a_RK.new_zeros(len(offsets_E), grad_RN.shape[1], a_RK.shape[1])
    if _has_native_kernel(a_RK):
        return torch._grouped_mm(grad_RN.t(), a_RK, offs=offsets_E)
    return grouped_mm_weight_grad_reference(grad_RN, a_RK, offsets_E)
