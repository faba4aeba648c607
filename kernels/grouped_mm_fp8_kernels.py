"""The Triton kernels of :mod:`kernels.grouped_mm_fp8`.

Tiles are a loop and the steps of each another one within it. One loop for both, as in the kernels for bf16, would load a tile
while the one before is stored, but keeps what the store needs beside the sums and the products that are being scaled: 364 bytes
a thread then go through local memory in every step (ptxas for sm_90a), and none this way.
"""

import triton
import triton.language as tl

from kernels.grouped_mm_kernels import _halves, _place_of_tile, _row_tiles, _store_rows


@triton.jit
def _store_columns(out_desc, out_ptr, total_MN, row, end, n, N):
    """Stores a tile 64 columns at a time, which leaves most of shared memory to the loads."""
    if total_MN.shape[1] > 64:
        left_MN, right_MN = _halves(total_MN)
        _store_columns(out_desc, out_ptr, left_MN, row, end, n, N)
        _store_columns(out_desc, out_ptr, right_MN, row, end, n + total_MN.shape[1] // 2, N)
    else:
        _store_rows(out_desc, out_ptr, total_MN.to(out_ptr.dtype.element_ty), row, end, n, N)


@triton.jit(do_not_specialize=["R"])
def _grouped_mm_blockwise_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, out_ptr, offsets_ptr, E, K, N, R,
    E_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r] = a[r] @ b[e]^T for the rows r of group e; BLOCK_K numbers of a row of a, and BLOCK_K x BLOCK_K of b, have a scale.

    The product of a step is scaled, then added up in fp32. With a tile of two blocks of columns each has its own accumulator:
    both products of a step would not fit the registers beside them, and one is added up while the tensor cores do the other.
    """
    last_E, first_row_E, tiles_M = _row_tiles(offsets_ptr, E, E_P, BLOCK_M)
    tiles_N, steps = tl.cdiv(N, BLOCK_N), K // BLOCK_K
    for tile in range(tl.program_id(0), tiles_M * tiles_N, tl.num_programs(0)):
        n = tile % tiles_N * BLOCK_N
        e, row, end = _place_of_tile(tile // tiles_N, last_E, first_row_E, offsets_ptr, BLOCK_M)
        row_M = row + tl.arange(0, BLOCK_M)
        left_MN = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        right_MN = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for step in range(0, steps):
            a_MK = a_desc.load([row, step * BLOCK_K])
            a_scale_M = tl.load(a_scale_ptr + step * R.to(tl.int64) + row_M, mask=row_M < end, other=0.0)
            b_at = b_scale_ptr + (e * (N // BLOCK_K) + n // BLOCK_K) * steps + step
            left_NK = b_desc.load([e, n, step * BLOCK_K]).reshape(BLOCK_K, BLOCK_K)
            left_MN += tl.dot(a_MK, tl.trans(left_NK)) * (a_scale_M * tl.load(b_at))[:, None]
            if BLOCK_N > BLOCK_K:
                right_NK = b_desc.load([e, n + BLOCK_K, step * BLOCK_K]).reshape(BLOCK_K, BLOCK_K)
                right_scale = tl.load(b_at + steps, mask=n + BLOCK_K < N, other=0.0)
                right_MN += tl.dot(a_MK, tl.trans(right_NK)) * (a_scale_M * right_scale)[:, None]
        _store_columns(out_desc, out_ptr, left_MN, row, end, n, N)
        if BLOCK_N > BLOCK_K:
            _store_columns(out_desc, out_ptr, right_MN, row, end, n + BLOCK_K, N)


@triton.jit
def _store_expert(out_desc, total_NK, e, n, k):
    dtype: tl.constexpr = out_desc.dtype
    HALF: tl.constexpr = total_NK.shape[1] // 2
    left_NK, right_NK = _halves(total_NK)
    out_desc.store([e, n, k], left_NK.to(dtype).reshape(1, total_NK.shape[0], HALF))
    out_desc.store([e, n, k + HALF], right_NK.to(dtype).reshape(1, total_NK.shape[0], HALF))


@triton.jit
def _weight_grad_blockwise_kernel(
    grad_desc, a_desc, out_desc, grad_scale_ptr, a_scale_ptr, ends_ptr, E, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[e] = grad[:, columns of e] @ a[:, columns of e]^T, [N, K]; BLOCK_R numbers of a row of either have a scale.

    Groups end at multiples of BLOCK_R and are not empty. A tile of more than 128 rows is two, as above, which share the scales of
    a, of which a thread keeps many.
    """
    HALF: tl.constexpr = BLOCK_N if BLOCK_N < 128 else 128
    tiles_K = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N) * tiles_K
    for tile in range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        e, n, k = tile // tiles, tile % tiles // tiles_K * BLOCK_N, tile % tiles_K * BLOCK_K
        first = tl.load(ends_ptr + e - 1, mask=e > 0, other=0) // BLOCK_R
        n_N, k_K = n + tl.arange(0, HALF), k + tl.arange(0, BLOCK_K)
        upper_NK = tl.zeros([HALF, BLOCK_K], tl.float32)
        lower_NK = tl.zeros([HALF, BLOCK_K], tl.float32)
        for block in range(first, tl.load(ends_ptr + e) // BLOCK_R):
            a_RK = tl.trans(a_desc.load([k, block * BLOCK_R]))
            upper_NR = grad_desc.load([n, block * BLOCK_R])
            grad_at_N = grad_scale_ptr + block * N.to(tl.int64) + n_N
            a_scale_K = tl.load(a_scale_ptr + block * K.to(tl.int64) + k_K, mask=k_K < K, other=0.0)
            upper_scale_N = tl.load(grad_at_N, mask=n_N < N, other=0.0)
            upper_NK += tl.dot(upper_NR, a_RK) * upper_scale_N[:, None] * a_scale_K[None, :]
            if BLOCK_N > HALF:
                lower_NR = grad_desc.load([n + HALF, block * BLOCK_R])
                lower_scale_N = tl.load(grad_at_N + HALF, mask=n_N + HALF < N, other=0.0)
                lower_NK += tl.dot(lower_NR, a_RK) * lower_scale_N[:, None] * a_scale_K[None, :]
        _store_expert(out_desc, upper_NK, e, n, k)
        if BLOCK_N > HALF:
            _store_expert(out_desc, lower_NK, e, n + HALF, k)
