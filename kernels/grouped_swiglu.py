"""Gate and up projection and SwiGLU of the experts' rows, in one kernel where that was measured to be faster than two."""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.grouped_mm import Tile, grouped_mm, has_native_kernel
from kernels.grouped_mm_kernels import _grouped_swiglu_kernel
from kernels.swiglu import weighted_swiglu

# By (D, F), for at least 512 rows an expert on average.
_FUSED = {(2048, 768), (2048, 1408)}
_TILE = Tile(128, 128, 64, 8, 3)  # columns of each of the two products


def up_projection(rows_RD: Tensor, w13_E2FD: Tensor, offsets_E: Tensor) -> Tensor:
    """Gate and up pre-activations [R, 2, F] of the rows, in one product."""
    product = grouped_mm(rows_RD, w13_E2FD.flatten(1, 2).transpose(1, 2), offsets_E)
    return product.view(-1, *w13_E2FD.shape[1:3])


def grouped_swiglu_reference(
    rows_RD: Tensor, w13_E2FD: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    gate_up_R2F = up_projection(rows_RD, w13_E2FD, offsets_E)
    return weighted_swiglu(gate_up_R2F, weights_P, pair_R, offsets_E[-1:]), gate_up_R2F


def _launch(
    rows_RD: Tensor, w13_E2FD: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor, keep: bool, programs: int, tile: Tile
) -> tuple[Tensor, Tensor]:
    (R, D), (E, _, F, _) = rows_RD.shape, w13_E2FD.shape
    act_RF, gate_up_R2F = rows_RD.new_empty(R, F), rows_RD.new_empty(R if keep else 0, 2, F)
    act_desc = TensorDescriptor.from_tensor(act_RF, [tile.m, tile.n])
    gate_up_desc = TensorDescriptor.from_tensor(gate_up_R2F.flatten(1), [tile.m, tile.n]) if keep else act_desc
    _grouped_swiglu_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows_RD, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(w13_E2FD.flatten(0, 1), [1, tile.n, tile.k]),
        gate_up_desc, act_desc, gate_up_R2F, act_RF, weights_P, pair_R, offsets_E, E, D, F,
        E_P=triton.next_power_of_2(E), KEEP=keep,
        BLOCK_M=tile.m, BLOCK_F=tile.n, BLOCK_D=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return act_RF, gate_up_R2F


@torch.library.custom_op("moe_titan::fused_grouped_swiglu", mutates_args=())
def fused_grouped_swiglu(
    rows_RD: Tensor, w13_E2FD: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """:func:`grouped_swiglu` as one kernel; F is a multiple of 128, D of 8, and there is at least one row."""
    if not rows_RD.is_cuda:
        act_RF, gate_up_R2F = grouped_swiglu_reference(rows_RD, w13_E2FD, weights_P, pair_R, offsets_E)
        return act_RF, gate_up_R2F if keep else gate_up_R2F[:0].clone()
    processors = torch.cuda.get_device_properties(rows_RD.device).multi_processor_count
    return _launch(rows_RD, w13_E2FD, weights_P, pair_R, offsets_E, keep, processors, _TILE)


@fused_grouped_swiglu.register_fake
def _(rows_RD: Tensor, w13_E2FD: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor, keep: bool):
    R, F = rows_RD.shape[0], w13_E2FD.shape[2]
    return rows_RD.new_empty(R, F), rows_RD.new_empty(R if keep else 0, 2, F)


def grouped_swiglu(
    rows_RD: Tensor, w13_E2FD: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``weights[pair[r]] * silu(w1[e] x[r]) * (w3[e] x[r])`` for every row r of group e.

    Args:
        rows_RD: [R, D].
        w13_E2FD: [E, 2, F, D], same dtype.
        weights_P, pair_R: see :func:`kernels.swiglu.weighted_swiglu`.
        offsets_E: [E] int32 ends of the groups.
        keep: return the pre-activations, too.
    Returns:
        Activation [R, F] and pre-activations [R, 2, F] or None; rows past the last offset are unspecified.
    """
    E, _, F, D = w13_E2FD.shape
    if has_native_kernel(rows_RD) and (D, F) in _FUSED and len(rows_RD) >= 512 * E:
        act_RF, gate_up_R2F = fused_grouped_swiglu(rows_RD, w13_E2FD, weights_P, pair_R, offsets_E, keep)
    else:
        act_RF, gate_up_R2F = grouped_swiglu_reference(rows_RD, w13_E2FD, weights_P, pair_R, offsets_E)
    return act_RF, gate_up_R2F if keep else None
