"""The Triton kernels of :mod:`kernels.quantize`, and what they share with others that quantise.

A row of numbers is a tile [blocks, 128]: a block of a recipe is a row of the tile.
"""

import triton
import triton.language as tl


@triton.jit
def bits_of(x):
    """Magnitudes as the bits of an fp32, by which NaN is larger than infinity."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def largest_bits(x, axis: tl.constexpr):
    return tl.max(bits_of(x), axis)


@triton.jit
def factor_of(bits, POWER_OF_TWO: tl.constexpr):
    """What elements are multiplied by so that the largest, which has these bits, fits E4M3: the inverse of their scale."""
    amax = bits.to(tl.float32, bitcast=True)
    factor = tl.div_rn(448.0, tl.where(amax < 1e-12, 1e-12, amax))
    if POWER_OF_TWO:
        floor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor > 0, floor, float("nan"))
    return factor


@triton.jit
def row_bits(x_BC, BLOCKWISE: tl.constexpr):
    """The largest magnitude of each block, or in each block's place that of the whole row."""
    bits_B = largest_bits(x_BC, 1)
    if BLOCKWISE:
        return bits_B
    return tl.zeros_like(bits_B) + tl.max(bits_B, 0)


@triton.jit
def places(BLOCKS: tl.constexpr):
    """Where the numbers of a row stand, as the tile."""
    return tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def store_scales(factor_B, scale_ptr, stride_b, blocks, wanted, BLOCKWISE: tl.constexpr):
    b_B = tl.arange(0, factor_B.shape[0])
    # Without blocks all factors are the same, of which one is stored.
    count = blocks if BLOCKWISE else 1
    tl.store(scale_ptr + b_B * stride_b, tl.div_rn(1.0, factor_B), mask=(b_B < count) & wanted)


@triton.jit(do_not_specialize=["num_rows"])
def _spread_rows_kernel(
    x_ptr, row_ptr, out_ptr, scale_ptr, packed_ptr, packed_scale_ptr, D, stride_t, num_rows, W,
    K: tl.constexpr, BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """``packed``: rows of W words, if the token itself is wanted as well."""
    token = tl.program_id(0).to(tl.int64)
    d_BC = places(BLOCKS)
    x_BC = tl.load(x_ptr + token * stride_t + d_BC, mask=d_BC < D, other=0.0).to(tl.float32)
    factor_B = factor_of(row_bits(x_BC, BLOCKWISE), not BLOCKWISE)
    out_BC = (x_BC * factor_B[:, None]).to(tl.float8e4nv)
    if packed_ptr is not None:
        tl.store(packed_ptr + token * W * 4 + d_BC, out_BC, mask=d_BC < D)
        store_scales(factor_B, packed_scale_ptr + token * W + D // 4, 1, D // 128, True, BLOCKWISE)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        tl.store(out_ptr + row * D + d_BC, out_BC, mask=(d_BC < D) & (row >= 0))
        store_scales(factor_B, scale_ptr + row, num_rows, D // 128, row >= 0, BLOCKWISE)


@triton.jit(do_not_specialize=["R"])
def _quantize_rows_kernel(
    x_ptr, num_rows_ptr, out_ptr, scale_ptr, D, R, BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr
):  # fmt: skip
    if num_rows_ptr is not None:
        R_used = tl.minimum(tl.load(num_rows_ptr), R)
    else:
        R_used = R
    for row in range(tl.program_id(0), R_used, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        d_BC = places(BLOCKS)
        x_BC = tl.load(x_ptr + row * D + d_BC, mask=d_BC < D, other=0.0).to(tl.float32)
        factor_B = factor_of(row_bits(x_BC, BLOCKWISE), not BLOCKWISE)
        tl.store(out_ptr + row * D + d_BC, (x_BC * factor_B[:, None]).to(tl.float8e4nv), mask=d_BC < D)
        store_scales(factor_B, scale_ptr + row, R, D // 128, True, BLOCKWISE)


@triton.jit
def _quantize_tiles_kernel(w_ptr, out_ptr, scale_ptr, N, K, TRANSPOSED: tl.constexpr):
    k, n, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_N, k_K = n * 128 + tl.arange(0, 128), k * 128 + tl.arange(0, 128)
    matrix = e.to(tl.int64) * N * K
    w_NK = tl.load(w_ptr + matrix + n_N[:, None] * K + k_K[None, :]).to(tl.float32)
    factor = factor_of(tl.max(largest_bits(w_NK, 1), 0), False)
    out_NK = (w_NK * factor).to(tl.float8e4nv)
    tiles_N, tiles_K = N // 128, K // 128
    if TRANSPOSED:
        tl.store(out_ptr + matrix + k_K[:, None] * N + n_N[None, :], tl.trans(out_NK))
        tl.store(scale_ptr + (e * tiles_K + k) * tiles_N + n, tl.div_rn(1.0, factor))
    else:
        tl.store(out_ptr + matrix + n_N[:, None] * K + k_K[None, :], out_NK)
        tl.store(scale_ptr + (e * tiles_N + n) * tiles_K + k, tl.div_rn(1.0, factor))
