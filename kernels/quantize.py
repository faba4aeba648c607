"""Operands of FP8 products: E4M3 elements with fp32 scales, quantised where they are gathered or turned.

An operand is its elements times its scales. Two kinds of scales, of which the second is called ``blockwise``: a power of two for
all that one sum runs over, and one of full precision for 128 by 128 numbers of a weight or 128 in a row of another operand.
Tensor cores of Hopper multiply FP8 only if both operands store side by side what is summed over: what is needed in both
directions is stored twice, and quantised twice but for what :mod:`kernels.turn_rows` turns. A row or block without a finite
maximum becomes NaN in products.
"""

import torch
import triton
from torch import Tensor

from kernels.ends import one_group
from kernels.op import op
from kernels.programs import TOGETHER, programs
from kernels.quantize_kernels import (
    _quantize_rows_kernel,
    _quantize_tiles_kernel,
    _spread_rows_kernel,
)

BLOCK = 128
E4M3 = torch.float8_e4m3fn


def quantize_reference(x_MK: Tensor, size_m: int, size_k: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Elements [M, K] and scales [M / size_m, K / size_k] of the blocks, which are whole."""
    blocks = x_MK.float().unflatten(0, (-1, size_m)).unflatten(2, (-1, size_k))
    factor = (448.0 / blocks.abs().amax((1, 3)).double().clamp(min=1e-12)).float()
    if power_of_two:
        factor = factor / (2 * torch.frexp(factor).mantissa)
    elements = (blocks * factor[:, None, :, None]).clamp(-448, 448).to(E4M3)
    return elements.view(x_MK.shape), 1 / factor


def quantize_rows_reference(x_RD: Tensor, blockwise: bool) -> tuple[Tensor, Tensor]:
    if not x_RD.numel():
        return empty_rows(x_RD, *x_RD.shape, blockwise)
    elements_RD, scale = quantize_reference(x_RD, 1, BLOCK if blockwise else x_RD.shape[1], not blockwise)
    return elements_RD, scale.t().contiguous() if blockwise else scale.flatten()


def quantize_columns_reference(x_RC: Tensor, offsets_E: Tensor, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    groups, start = [], 0
    for end in offsets_E.tolist():
        blocks = max(triton.cdiv(end - start, BLOCK), 1)
        groups.append(torch.nn.functional.pad(x_RC[start:end], (0, 0, 0, blocks * BLOCK + start - end)))
        start = end
    sizes = [BLOCK if blockwise else len(group) for group in groups]
    turned = [group.t().contiguous() for group in groups]
    quantized = [quantize_reference(x, 1, size, not blockwise) for x, size in zip(turned, sizes, strict=True)]
    elements_CW = torch.cat([elements.view(torch.uint8) for elements, _ in quantized], dim=1)
    scale = torch.cat([scale.t() for _, scale in quantized])
    ends = torch.tensor([len(group) for group in groups], dtype=torch.int32, device=x_RC.device).cumsum(0, dtype=torch.int32)
    unused = columns_width(len(x_RC), len(offsets_E)) - elements_CW.shape[1]
    scale = torch.nn.functional.pad(scale, (0, 0, 0, unused // BLOCK if blockwise else 0))
    return torch.nn.functional.pad(elements_CW, (0, unused)).view(E4M3), scale, ends


def quantize_tiles_reference(w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    E, N, K = w_ENK.shape
    elements, scale = quantize_reference(w_ENK.flatten(0, 1), BLOCK, BLOCK, False)
    elements, scale = elements.view(E, N, K), scale.view(E, N // BLOCK, K // BLOCK)
    if transposed:
        elements, scale = elements.transpose(1, 2), scale.transpose(1, 2)
    return elements.contiguous(), scale.contiguous()


def empty_rows(x: Tensor, R: int, D: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    """Room for the elements and scales of rows on the device of x."""
    scale_shape = (D // BLOCK, R) if blockwise else (R,)
    return x.new_empty(R, D, dtype=E4M3), x.new_empty(scale_shape, dtype=torch.float32)


def columns_width(R: int, E: int) -> int:
    """Room for R rows in groups that begin at multiples of a block and have one at least."""
    return (triton.cdiv(R, BLOCK) + E) * BLOCK


def empty_columns(x: Tensor, C: int, R: int, E: int, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the elements, scales and ends of R rows turned, on the device of x."""
    width = columns_width(R, E)
    scale = x.new_empty(width // BLOCK if blockwise else E, C, dtype=torch.float32)
    return x.new_empty(C, width, dtype=E4M3), scale, x.new_empty(E, dtype=torch.int32)


def blocks_of_row(D: int) -> int:
    return triton.next_power_of_2(triton.cdiv(D, BLOCK))


def warps(D: int) -> int:
    return 4 if D <= 4096 else 8


def launch_spread(
    x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool, words_NW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """With ``words_NW`` it writes the packed tokens, too; see :mod:`kernels.packed_tokens`."""
    x_ND = x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
    (N, K), D = row_NK.shape, x_ND.shape[1]
    rows_RD, scale = empty_rows(x_ND, num_rows, x_ND.shape[1], blockwise)
    packed, width = (None, None), 0
    if words_NW is not None:
        packed, width = (words_NW.view(E4M3), words_NW.view(torch.float32)), words_NW.shape[1]
    if x_ND.numel():
        _spread_rows_kernel[(N,)](
            x_ND, row_NK.contiguous(), rows_RD, scale, *packed, D, x_ND.stride(0), num_rows, width,
            K=K, BLOCKS=blocks_of_row(D), BLOCKWISE=blockwise, num_warps=warps(D),
        )  # fmt: skip
    return rows_RD, scale


@op("spread_rows_fp8")
def spread_rows_fp8(x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    """:func:`kernels.permute.spread_rows` that quantises each token on its way.

    Args:
        x_ND: [N, D] bf16 or fp32; D is a multiple of 128 where blockwise.
    Returns:
        Elements [num_rows, D]; scales [num_rows], blockwise [D / 128, num_rows]. Rows that no token names are unspecified.
    """
    if x_ND.is_cuda:
        return launch_spread(x_ND, row_NK, num_rows, blockwise)
    rows_RD, scale = empty_rows(x_ND, num_rows, x_ND.shape[1], blockwise)
    named_NK = row_NK >= 0
    row_P, token_P = row_NK[named_NK].long(), named_NK.nonzero()[:, 0]
    elements_ND, token_scale = quantize_rows_reference(x_ND, blockwise)
    rows_RD.view(torch.uint8)[row_P] = elements_ND.view(torch.uint8)[token_P]
    scale[..., row_P] = token_scale[..., token_P]
    return rows_RD, scale


@torch.library.register_fake(spread_rows_fp8)
def _(x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(x_ND, num_rows, x_ND.shape[1], blockwise)


def _launch_rows(x_RD: Tensor, num_rows: Tensor | None, blockwise: bool) -> tuple[Tensor, Tensor]:
    (R, D), x_RD = x_RD.shape, x_RD.contiguous()
    elements_RD, scale = empty_rows(x_RD, R, D, blockwise)
    if x_RD.numel():
        _quantize_rows_kernel[programs(R, x_RD.device)](
            x_RD, num_rows, elements_RD, scale, D, R,
            BLOCKS=blocks_of_row(D), BLOCKWISE=blockwise, num_warps=warps(D),
        )  # fmt: skip
    return elements_RD, scale


@op("quantize_rows")
def quantize_rows(x_RD: Tensor, num_rows: Tensor | None, blockwise: bool) -> tuple[Tensor, Tensor]:
    """Quantises rows, which a product sums over.

    Args:
        x_RD: [R, D] bf16 or fp32; D is a multiple of 128 where blockwise.
        num_rows: one-element integer tensor on the device: the rows that hold data. None: all.
    Returns:
        Elements [R, D]; scales [R], blockwise [D / 128, R]. Rows from ``num_rows`` on are unspecified.
    """
    return _launch_rows(x_RD, num_rows, blockwise) if x_RD.is_cuda else quantize_rows_reference(x_RD, blockwise)


@torch.library.register_fake(quantize_rows)
def _(x_RD: Tensor, num_rows: Tensor | None, blockwise: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(x_RD, *x_RD.shape, blockwise)


def launch_columns(
    x: Tensor, offsets_E: Tensor, blockwise: bool, pair_R: Tensor | None, choices: int, x_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``x_scale`` blockwise, of elements of E4M3 that have a scale for 128 of a row."""
    from kernels.group_pieces import PIECE, WARPS
    from kernels.launch import launch  # takes Gluon, as the kernels do
    from kernels.quantize_columns_kernels import COLUMNS, _quantize_columns_kernel

    (rows, C), E, x = x.shape, len(offsets_E), x if x.stride(1) == 1 else x.contiguous()
    rows = rows if pair_R is None else len(pair_R)
    elements_CW, scale, ends_E = empty_columns(x, C, rows, E, blockwise)
    slabs = triton.cdiv(C, COLUMNS.value)
    parts = slabs * (triton.cdiv(rows, BLOCK * PIECE.value) + E) * (1 if blockwise else 2)
    bits = None if blockwise else scale.new_zeros(E * (C + slabs) + 1, dtype=torch.int32)
    launch(
        _quantize_columns_kernel, programs(parts, x.device, TOGETHER), x, x_scale, pair_R, offsets_E, bits, elements_CW, scale,
        ends_E, C, E, elements_CW.shape[1], x.stride(0), 0 if x_scale is None else x_scale.stride(0),
        options={"num_warps": WARPS.value}, CHOICES=0 if pair_R is None else choices, E_P=triton.next_power_of_2(E),
    )  # fmt: skip
    return elements_CW, scale, ends_E


@op("quantize_columns")
def quantize_columns(
    x_RC: Tensor, offsets_E: Tensor | None, blockwise: bool, pair_R: Tensor | None = None, choices: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises the columns of each group of rows, over which a product sums, and turns them into rows.

    Args:
        x_RC: [R, C] bf16 or fp32; with ``pair_R`` [N, C], of which row r of R is ``x[pair_R[r] // choices]``.
        offsets_E: [E] int32 ends of the groups of rows. None: they are one group.
    Returns:
        Elements [C, W]: of each group its rows, then zeros up to a multiple of 128, at least one; W is room for that. Scales
        [E, C], blockwise [W / 128, C]. The end of each group in W, int32 [E]. What is past the last is unspecified.
    """
    if offsets_E is None:
        offsets_E = one_group(len(x_RC if pair_R is None else pair_R), x_RC.device)
    if x_RC.is_cuda:
        return launch_columns(x_RC, offsets_E, blockwise, pair_R, choices)
    if pair_R is not None:
        x_RC = x_RC[(pair_R // choices).clamp(min=0).long()]
    return quantize_columns_reference(x_RC, offsets_E, blockwise)


@torch.library.register_fake(quantize_columns)
def _(
    x_RC: Tensor, offsets_E: Tensor | None, blockwise: bool, pair_R: Tensor | None = None, choices: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    groups = 1 if offsets_E is None else len(offsets_E)
    return empty_columns(x_RC, x_RC.shape[1], len(x_RC) if pair_R is None else len(pair_R), groups, blockwise)


def _launch_tiles(w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    (E, N, K), w_ENK = w_ENK.shape, w_ENK.contiguous()
    elements, scale = _empty_tiles(w_ENK, transposed)
    _quantize_tiles_kernel[(K // BLOCK, N // BLOCK, E)](w_ENK, elements, scale, N, K, TRANSPOSED=transposed, num_warps=8)
    return elements, scale


def _empty_tiles(w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    E, *sizes = w_ENK.transpose(1, 2).shape if transposed else w_ENK.shape
    return w_ENK.new_empty(E, *sizes, dtype=E4M3), w_ENK.new_empty(E, *(n // BLOCK for n in sizes), dtype=torch.float32)


@op("quantize_tiles")
def quantize_tiles(w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Quantises matrices in tiles of 128 x 128.

    Args:
        w_ENK: [E, N, K] bf16 or fp32; N and K are multiples of 128.
    Returns:
        Elements [E, N, K] and scales [E, N / 128, K / 128], N and K swapped if transposed.
    """
    return _launch_tiles(w_ENK, transposed) if w_ENK.is_cuda else quantize_tiles_reference(w_ENK, transposed)


@torch.library.register_fake(quantize_tiles)
def _(w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    return _empty_tiles(w_ENK, transposed)


def quantize_weights(w_ENK: Tensor, blockwise: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Weights for a product that sums over K, or over N if transposed.

    Returns:
        Elements [E, N, K] and scales [E, N], blockwise [E, N / 128, K / 128]; N and K swapped if transposed. The elements along
        the last dimension are side by side.
    """
    E, N, K = w_ENK.shape
    if blockwise:
        return quantize_tiles(w_ENK, transposed)
    rows = w_ENK.flatten(0, 1)
    if not transposed:
        elements, scale = quantize_rows(rows, None, False)
        return elements.view(E, N, K), scale.view(E, N)
    ends_E = None if E == 1 else torch.arange(N, (E + 1) * N, N, dtype=torch.int32, device=w_ENK.device)
    elements_KW, scale_EK, _ = quantize_columns(rows, ends_E, False)
    width = triton.cdiv(N, BLOCK) * BLOCK
    return elements_KW[:, : E * width].unflatten(1, (E, width)).transpose(0, 1)[:, :, :N], scale_EK
