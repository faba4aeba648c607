"""Tokens as they travel in FP8: a token is a row of 32-bit words, its E4M3 elements and behind them its scales.

Both are those of :func:`kernels.quantize.quantize_rows`, so what arrives is an operand of the experts' first product. Rows are
whole units of 64 bytes, which are copied fast whoever copies them; what is behind the scales is unspecified. Other rows that are
to be kept in FP8 are packed alike.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op
from kernels.quantize import (
    BLOCK,
    E4M3,
    blocks_of_row,
    empty_columns,
    empty_rows,
    launch_columns,
    launch_spread,
    quantize_columns,
    quantize_rows_reference,
    spread_rows_fp8,
    warps,
)
from kernels.quantize_kernels import factor_of, places, row_bits, store_scales


class PackedTokens(NamedTuple):
    """``words_NW`` int32, of tokens of width D."""

    words_NW: Tensor
    D: int
    blockwise: bool


class Packing(NamedTuple):
    """Packs tokens for experts whose recipe is blockwise, or rowwise."""

    blockwise: bool

    def pack(self, x_TD: Tensor) -> Tensor:
        """The words of :func:`pack_tokens`; no gradient."""
        return pack_tokens(x_TD.detach(), self.blockwise)

    def received(self, words_NW: Tensor, D: int) -> PackedTokens:
        return PackedTokens(words_NW, D, self.blockwise)


def scales_of_token(D: int, blockwise: bool) -> int:
    return D // BLOCK if blockwise else 1


def words_of_token(D: int, blockwise: bool) -> int:
    return triton.cdiv(D // 4 + scales_of_token(D, blockwise), 16) * 16


def pack_tokens_reference(x_TD: Tensor, blockwise: bool) -> Tensor:
    T, D = x_TD.shape
    elements_TD, scale = quantize_rows_reference(x_TD, blockwise)
    scale_TS = scale.t() if blockwise else scale[:, None]
    words = elements_TD.view(torch.int32), scale_TS.contiguous().view(torch.int32)
    return torch.nn.functional.pad(torch.cat(words, dim=1), (0, words_of_token(D, blockwise) - D // 4 - scale_TS.shape[1]))


def elements_and_scales(tokens: PackedTokens) -> tuple[Tensor, Tensor]:
    """Where they lie: [N, D] E4M3 and [N] fp32, blockwise [N, D / 128]."""
    words_NW, D, blockwise = tokens
    scale = words_NW.view(torch.float32)[:, D // 4 : D // 4 + scales_of_token(D, blockwise)]
    return words_NW.view(E4M3)[:, :D], scale if blockwise else scale[:, 0]


def unpack_tokens(tokens: PackedTokens) -> Tensor:
    """[N, D] in fp32: elements times scales."""
    words_NW, D, blockwise = tokens
    scales = scales_of_token(D, blockwise)
    elements_ND = words_NW[:, : D // 4].contiguous().view(E4M3).float()
    scale_NS = words_NW[:, D // 4 : D // 4 + scales].contiguous().view(torch.float32)
    return (elements_ND.view(-1, scales, D // scales) * scale_NS[:, :, None]).flatten(1)


@triton.jit
def _pack_kernel(
    x_ptr, num_rows_ptr, elements_ptr, scale_ptr, D, stride_t, W, BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    wanted = True if num_rows_ptr is None else token < tl.load(num_rows_ptr)
    if wanted:
        d_BC = places(BLOCKS)
        x_BC = tl.load(x_ptr + token * stride_t + d_BC, mask=d_BC < D, other=0.0).to(tl.float32)
        factor_B = factor_of(row_bits(x_BC, BLOCKWISE), not BLOCKWISE)
        tl.store(elements_ptr + token * W * 4 + d_BC, (x_BC * factor_B[:, None]).to(tl.float8e4nv), mask=d_BC < D)
        store_scales(factor_B, scale_ptr + token * W + D // 4, 1, D // 128, True, BLOCKWISE)


@triton.jit(do_not_specialize=["num_rows"])
def _spread_packed_kernel(
    words_ptr, row_ptr, rows_ptr, scale_ptr, words, scales, W, num_rows, K: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Elements and scales by their bits."""
    token, w_W = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_W)
    word_W = tl.load(words_ptr + token * W + w_W, mask=w_W < words + scales, other=0)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        tl.store(rows_ptr + row * words + w_W, word_W, mask=(w_W < words) & (row >= 0))
        to_W = scale_ptr + (w_W - words).to(tl.int64) * num_rows + row
        tl.store(to_W, word_W, mask=(w_W >= words) & (w_W < words + scales) & (row >= 0))


def _launch_pack(x_TD: Tensor, blockwise: bool, num_rows: Tensor | None = None) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, D), words_TW = x_TD.shape, _empty_words(x_TD, blockwise)
    if T:
        _pack_kernel[(T,)](
            x_TD, num_rows, words_TW.view(E4M3), words_TW.view(torch.float32), D, x_TD.stride(0), words_TW.shape[1],
            BLOCKS=blocks_of_row(D), BLOCKWISE=blockwise, num_warps=warps(D),
        )  # fmt: skip
    return words_TW


def _empty_words(x_TD: Tensor, blockwise: bool) -> Tensor:
    T, D = x_TD.shape
    return x_TD.new_empty(T, words_of_token(D, blockwise), dtype=torch.int32)


def _launch_spread(words_NW: Tensor, row_NK: Tensor, num_rows: int, D: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    (N, W), K = words_NW.shape, row_NK.shape[1]
    rows_RD, scale = empty_rows(words_NW, num_rows, D, blockwise)
    if N:
        _spread_packed_kernel[(N,)](
            words_NW.contiguous(), row_NK.contiguous(), rows_RD.view(torch.int32), scale.view(torch.int32),
            D // 4, scales_of_token(D, blockwise), W, num_rows, K=K, BLOCK_W=triton.next_power_of_2(W), num_warps=4,
        )  # fmt: skip
    return rows_RD, scale


@op("pack_tokens")
def pack_tokens(x_TD: Tensor, blockwise: bool, num_rows: Tensor | None = None) -> Tensor:
    """Quantises tokens for their way.

    Args:
        x_TD: [T, D] bf16 or fp32; D is a multiple of 4, and of 128 where blockwise.
        num_rows: if given, so many tokens hold data (one-element integer tensor on the device).
    Returns:
        [T, W] int32, W words for D elements and the scales; tokens from ``num_rows`` on are unspecified.
    """
    return _launch_pack(x_TD, blockwise, num_rows) if x_TD.is_cuda else pack_tokens_reference(x_TD, blockwise)


@torch.library.register_fake(pack_tokens)
def _(x_TD: Tensor, blockwise: bool, num_rows: Tensor | None = None) -> Tensor:
    return _empty_words(x_TD, blockwise)


def _launch_spread_and_pack(x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    words_NW = _empty_words(x_ND, blockwise)
    return *launch_spread(x_ND, row_NK, num_rows, blockwise, words_NW), words_NW


@op("spread_and_pack")
def spread_and_pack(x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`kernels.quantize.spread_rows_fp8` and :func:`pack_tokens` of the same tokens in one pass."""
    if x_ND.is_cuda:
        return _launch_spread_and_pack(x_ND, row_NK, num_rows, blockwise)
    return *spread_rows_fp8(x_ND, row_NK, num_rows, blockwise), pack_tokens_reference(x_ND, blockwise)


@torch.library.register_fake(spread_and_pack)
def _(x_ND: Tensor, row_NK: Tensor, num_rows: int, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_rows(x_ND, num_rows, x_ND.shape[1], blockwise), _empty_words(x_ND, blockwise)


@op("spread_packed")
def spread_packed(words_NW: Tensor, row_NK: Tensor, num_rows: int, D: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    """:func:`kernels.quantize.spread_rows_fp8` of tokens that are packed already."""
    if words_NW.is_cuda:
        return _launch_spread(words_NW, row_NK, num_rows, D, blockwise)
    rows_RD, scale = empty_rows(words_NW, num_rows, D, blockwise)
    named_NK = row_NK >= 0
    row_P, words_PW = row_NK[named_NK].long(), words_NW[named_NK.nonzero()[:, 0]]
    rows_RD.view(torch.int32)[row_P] = words_PW[:, : D // 4]
    scale_PS = words_PW[:, D // 4 : D // 4 + scales_of_token(D, blockwise)].contiguous().view(torch.float32)
    scale[..., row_P] = scale_PS.t() if blockwise else scale_PS[:, 0]
    return rows_RD, scale


@torch.library.register_fake(spread_packed)
def _(words_NW: Tensor, row_NK: Tensor, num_rows: int, D: int, blockwise: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(words_NW, num_rows, D, blockwise)


@op("quantize_packed_columns")
def quantize_packed_columns(
    words_NW: Tensor, D: int, offsets_E: Tensor, pair_R: Tensor, choices: int
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`kernels.quantize.quantize_columns`, blockwise, of rows that are packed tokens, multiplied out in fp32 where they are
    read."""
    tokens = PackedTokens(words_NW, D, True)
    if not words_NW.is_cuda:
        return quantize_columns(unpack_tokens(tokens), offsets_E, True, pair_R, choices)
    elements_ND, scale = elements_and_scales(tokens)
    return launch_columns(elements_ND, offsets_E, True, pair_R, choices, scale)


@torch.library.register_fake(quantize_packed_columns)
def _(words_NW: Tensor, D: int, offsets_E: Tensor, pair_R: Tensor, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty_columns(words_NW, D, len(pair_R), len(offsets_E), True)
