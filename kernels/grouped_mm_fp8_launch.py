"""Launches the blockwise kernels of :mod:`kernels.grouped_mm_fp8`. Apart from it, because it takes Gluon to import this."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.grouped_mm import Tile
from kernels.grouped_mm_fp8_kernels import (
    _grouped_mm_blockwise_kernel,
    _weight_grad_blockwise_kernel,
)
from kernels.quantize import BLOCK, E4M3

_GLUON = {E4M3: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [*block], gl.NVMMASharedLayout.get_default_for([*block], _GLUON[x.dtype]))


def _options(tile: Tile) -> dict[str, int]:
    """How the kernels run: with one or two consumers beside the warps that load, and an even share of the registers."""
    consumers = tile.n // BLOCK
    threads = 128 * (consumers + 1) * tile.programs
    return {"CONSUMERS": consumers, "STAGES": tile.stages, "num_warps": 4, "maxnreg": 65536 // threads // 8 * 8}


def launch_grouped_mm(
    a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, tile: Tile, programs: int
) -> Tensor:
    (R, K), (E, N, _) = a_RK.shape, b_ENK.shape
    out_RN = a_RK.new_empty(R, N, dtype=torch.bfloat16)
    _grouped_mm_blockwise_kernel[(programs,)](
        _descriptor(a_RK, BLOCK, BLOCK), _descriptor(b_ENK.flatten(0, 1), BLOCK, BLOCK), _descriptor(out_RN, 64, 64),
        a_scale, b_scale, out_RN, offsets_E, E, K, N, R, **_options(tile),
    )  # fmt: skip
    return out_RN


def launch_weight_grad(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, tile: Tile, programs: int
) -> Tensor:
    N, K, E = len(grad_NW), len(a_KW), len(ends_E)
    out_ENK = a_KW.new_empty(E, N, K, dtype=torch.bfloat16)
    _weight_grad_blockwise_kernel[(programs,)](
        _descriptor(grad_NW, BLOCK, BLOCK), _descriptor(a_KW, BLOCK, BLOCK),
        _descriptor(grad_scale, 1, BLOCK), _descriptor(a_scale, 1, BLOCK),
        _descriptor(out_ENK.flatten(0, 1), 64, 64), ends_E, E, N, K, **_options(tile),
    )  # fmt: skip
    return out_ENK
