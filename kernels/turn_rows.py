"""Rows of FP8 operands turned for a weight gradient, so that both its uses have the same elements.

A weight gradient sums over rows, each of which has a scale of its own. Scales are powers of two: rows are brought to the largest
scale of 128 of them by a change of their elements' exponents, which loses nothing but what becomes smaller than E4M3's smallest:
a row's elements keep all of their bits down to 2^-14 of the largest number of the 128 rows.
"""

import torch
import triton
from torch import Tensor

from kernels.ends import one_group
from kernels.op import op
from kernels.programs import FEW, programs
from kernels.quantize import BLOCK, E4M3, columns_width


def turn_rows_reference(x_RC: Tensor, scale_R: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x_RC.dtype != E4M3:
        x_RC = (x_RC.float() / scale_R[:, None]).to(E4M3)
    turned, scales, ends, start, end_of_group = [], [], [], 0, 0
    for end in offsets_E.tolist():
        blocks = max(triton.cdiv(end - start, BLOCK), 1)
        missing = blocks * BLOCK + start - end
        x_BRC = torch.nn.functional.pad(x_RC[start:end].float(), (0, 0, 0, missing)).unflatten(0, (blocks, BLOCK))
        scale_BR = torch.nn.functional.pad(scale_R[start:end], (0, missing)).view(blocks, BLOCK)
        largest_B = scale_BR.amax(1)
        largest_B = torch.where(largest_B == 0, 1, largest_B)
        turned.append((x_BRC * (scale_BR / largest_B[:, None])[:, :, None]).flatten(0, 1).t().to(E4M3).view(torch.uint8))
        scales.append(largest_B)
        start, end_of_group = end, end_of_group + blocks * BLOCK
        ends.append(end_of_group)
    elements_CW, scale_B = torch.cat(turned, dim=1), torch.cat(scales)
    unused = columns_width(len(x_RC), len(offsets_E)) - end_of_group
    elements_CW, scale_B = (torch.nn.functional.pad(x, (0, n)) for x, n in ((elements_CW, unused), (scale_B, unused // BLOCK)))
    return elements_CW.view(E4M3), scale_B, torch.tensor(ends, dtype=torch.int32, device=x_RC.device)


def _empty(x: Tensor, R: int, E: int) -> tuple[Tensor, Tensor, Tensor]:
    width = columns_width(R, E)
    scale = x.new_empty(width // BLOCK, dtype=torch.float32)
    return x.new_empty(x.shape[1], width, dtype=E4M3), scale, x.new_empty(E, dtype=torch.int32)


def launch_turn_rows(
    x: Tensor, x_scale: Tensor, offsets_E: Tensor, pair_R: Tensor | None, choices: int
) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.group_pieces import PIECE, WARPS
    from kernels.launch import launch  # takes Gluon, as the kernel does
    from kernels.turn_rows_kernels import _turn_rows_kernel, columns

    x = x if x.stride(1) == 1 else x.contiguous()
    rows, C, E = len(x) if pair_R is None else len(pair_R), x.shape[1], len(offsets_E)
    elements_CW, scale_B, ends_E = _empty(x, rows, E)
    width = columns(x.itemsize)
    parts = triton.cdiv(C, width) * (triton.cdiv(rows, BLOCK * PIECE.value) + E)
    launch(
        _turn_rows_kernel, programs(parts, x.device, FEW), x, x_scale, pair_R, offsets_E, elements_CW, scale_B, ends_E,
        C, E, elements_CW.shape[1], x.stride(0), x_scale.stride(0),
        options={"num_warps": WARPS.value, "maxnreg": 128},
        CHOICES=0 if pair_R is None else choices, E_P=triton.next_power_of_2(E), COLUMNS=width,
    )  # fmt: skip
    return elements_CW, scale_B, ends_E


@op("turn_rows")
def turn_rows(
    x_RC: Tensor, scale_R: Tensor, offsets_E: Tensor | None, pair_R: Tensor | None = None, choices: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns groups of rows with a power-of-two scale each.

    Args:
        x_RC: [R, C] E4M3, the numbers of a row side by side; with ``pair_R`` [N, C], of which row r of R is
            ``x[pair_R[r] // choices]``. Or what has been quantised, bf16 or fp32, to save memory for its elements.
        scale_R: [R] or [N] fp32, powers of two or NaN, as of :func:`kernels.quantize.quantize_rows`.
        offsets_E: [E] int32 ends of the groups of rows. None: they are one group.
    Returns:
        Elements [C, W]: of each group its rows, then zeros up to a multiple of 128, at least one; W is room for that. Scales
        [W / 128], the largest of a block's rows each. The end of each group in W, int32 [E]. Past the last all is unspecified.
    """
    if offsets_E is None:
        offsets_E = one_group(len(x_RC if pair_R is None else pair_R), x_RC.device)
    if x_RC.is_cuda:
        return launch_turn_rows(x_RC, scale_R, offsets_E, pair_R, choices)
    if pair_R is not None:
        token_R = (pair_R // choices).clamp(min=0).long()
        x_RC, scale_R = x_RC.contiguous().view(torch.uint8)[token_R].view(x_RC.dtype), scale_R[token_R]
    return turn_rows_reference(x_RC, scale_R, offsets_E)


@torch.library.register_fake(turn_rows)
def _(
    x_RC: Tensor, scale_R: Tensor, offsets_E: Tensor | None, pair_R: Tensor | None = None, choices: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x_RC, len(x_RC) if pair_R is None else len(pair_R), 1 if offsets_E is None else len(offsets_E))
