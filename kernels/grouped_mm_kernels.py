"""The Triton kernels of :mod:`kernels.grouped_mm`."""

import triton
import triton.language as tl


@triton.jit
def _halves(x_MN):
    """The left and the right half of the columns: to store one after the other needs half of the shared memory on the way out."""
    HALF: tl.constexpr = x_MN.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x_MN, (x_MN.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def _store_rows(out_desc, out_ptr, out_MN, row, end, n, N):
    """Whole tiles go out asynchronously; the last of a group is cut off where the next group begins."""
    BLOCK_M: tl.constexpr = out_MN.shape[0]
    BLOCK_N: tl.constexpr = out_MN.shape[1]
    if row + BLOCK_M <= end:
        out_desc.store([row, n], out_MN)
    else:
        row_M, n_N = (row + tl.arange(0, BLOCK_M)).to(tl.int64), n + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + row_M[:, None] * N + n_N[None, :], out_MN, mask=(row_M < end)[:, None] & (n_N < N)[None, :])


@triton.jit
def _store_tile(out_desc, out_ptr, total_MN, row, end, n, N, HALVES: tl.constexpr):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HALVES:
        left_MN, right_MN = _halves(total_MN)
        _store_rows(out_desc, out_ptr, left_MN.to(dtype), row, end, n, N)
        _store_rows(out_desc, out_ptr, right_MN.to(dtype), row, end, n + total_MN.shape[1] // 2, N)
    else:
        _store_rows(out_desc, out_ptr, total_MN.to(dtype), row, end, n, N)


@triton.jit
def _row_tiles(offsets_ptr, E, E_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles of rows the groups have up to each, and the row at which tile 0 would stand if all were of that group."""
    e_E = tl.arange(0, E_P)
    start_E = tl.load(offsets_ptr + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    tiles_E = tl.cdiv(tl.load(offsets_ptr + e_E, mask=e_E < E, other=0) - start_E, BLOCK_M)
    tiles_E = tl.where(e_E < E, tiles_E, 0)
    last_E = tl.cumsum(tiles_E, axis=0)
    return last_E, start_E - (last_E - tiles_E) * BLOCK_M, tl.sum(tiles_E)


@triton.jit
def _place_of_tile(m, last_E, first_row_E, offsets_ptr, BLOCK_M: tl.constexpr):
    """The group of the m-th tile of rows, its first row, and where the group ends."""
    e = tl.sum((last_E <= m).to(tl.int32))
    row = tl.sum(tl.where(tl.arange(0, last_E.shape[0]) == e, first_row_E, 0)) + m * BLOCK_M
    return e, row, tl.load(offsets_ptr + e)


@triton.jit
def _grouped_mm_kernel(
    a_desc, b_desc, out_desc, out_ptr, offsets_ptr, E, K, N,
    E_P: tl.constexpr, B_IS_ENK: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r] = a[r] @ b[e] for the rows r of group e. A program takes every tile that lies a whole grid after its last one.

    Tiles and the steps along K are one loop, so that the loads of a tile are on their way while the one before is stored.
    """
    last_E, first_row_E, tiles_M = _row_tiles(offsets_ptr, E, E_P, BLOCK_M)
    tiles_N, steps = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0) - tl.num_programs(0)
    mine = tl.cdiv(tiles_M * tiles_N - tl.program_id(0), tl.num_programs(0))
    step, e, row, n, end = -1, 0, 0, 0, 0
    total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, mine * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += tl.num_programs(0)
            n = tile % tiles_N * BLOCK_N
            e, row, end = _place_of_tile(tile // tiles_N, last_E, first_row_E, offsets_ptr, BLOCK_M)
        a_MK = a_desc.load([row, step * BLOCK_K])
        if B_IS_ENK:
            b_KN = tl.trans(b_desc.load([e, n, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K))
        else:
            b_KN = b_desc.load([e, step * BLOCK_K, n]).reshape(BLOCK_K, BLOCK_N)
        total_MN = tl.dot(a_MK, b_KN, total_MN)
        if step == steps - 1:
            _store_tile(out_desc, out_ptr, total_MN, row, end, n, N, HALVES)
            total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def _group(offsets_ptr, e, BLOCK_R: tl.constexpr):
    """First row of group e, the row after its last, and the steps over them, of which an empty group takes one over zeros."""
    begin, end = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0), tl.load(offsets_ptr + e)
    return begin, end, tl.maximum(tl.cdiv(end - begin, BLOCK_R), 1)


@triton.jit
def _copy_tail(x_ptr, tail_ptr, e, first, end, block, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    i_R, c_C = tl.arange(0, BLOCK_R), block * BLOCK_C + tl.arange(0, BLOCK_C)
    row_R, mask_C = end - BLOCK_R + i_R, (c_C < C)[None, :]
    from_RC = x_ptr + row_R[:, None].to(tl.int64) * C + c_C[None, :]
    to_RC = tail_ptr + (e * BLOCK_R + i_R)[:, None].to(tl.int64) * C + c_C[None, :]
    tl.store(to_RC, tl.load(from_RC, mask=(row_R >= first)[:, None] & mask_C, other=0.0), mask=mask_C)


@triton.jit
def _copy_tails_kernel(
    grad_ptr, a_ptr, grad_tail_ptr, a_tail_ptr, offsets_ptr, N, K, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """tail[e] = the BLOCK_R rows up to the end of group e, zero where they are not of its last step.

    That of grad only for groups of less than BLOCK_R rows: the others have as many rows of their own before their end.
    """
    e, block = tl.program_id(0), tl.program_id(1)
    begin, end, steps = _group(offsets_ptr, e, BLOCK_R)
    first = begin + (steps - 1) * BLOCK_R
    blocks_K = tl.cdiv(K, BLOCK_C)
    if block < blocks_K:
        if first + BLOCK_R > end:
            _copy_tail(a_ptr, a_tail_ptr, e, first, end, block, K, BLOCK_R, BLOCK_C)
    elif begin + BLOCK_R > end:
        _copy_tail(grad_ptr, grad_tail_ptr, e, first, end, block - blocks_K, N, BLOCK_R, BLOCK_C)


@triton.jit
def _weight_grad_kernel(
    grad_desc, a_desc, grad_tail_desc, a_tail_desc, out_desc, offsets_ptr, E, N, K,
    E_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[e] = grad[rows of e]^T @ a[rows of e], [N, K]; a program's tiles and their steps are one loop as above.

    A step takes BLOCK_R rows by tensor descriptors, which cannot be masked: the last step of a group whose rows end within it
    reads the copy of :func:`_copy_tails_kernel`, so that rows of another group or of none, NaN maybe, are never multiplied.
    """
    e_E = tl.arange(0, E_P)
    begin_E = tl.load(offsets_ptr + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    steps_E = tl.cdiv(tl.load(offsets_ptr + e_E, mask=e_E < E, other=0) - begin_E, BLOCK_R)
    tiles_K = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N) * tiles_K
    # Every group has as many tiles as any other: a program's share of each is a difference of two quotients.
    before_E = tl.cdiv(tl.maximum(e_E * tiles - tl.program_id(0), 0), tl.num_programs(0))
    upto_E = tl.cdiv(tl.maximum(e_E * tiles + tiles - tl.program_id(0), 0), tl.num_programs(0))
    mine = tl.sum(tl.where(e_E < E, (upto_E - before_E) * tl.maximum(steps_E, 1), 0))

    tile = tl.program_id(0) - tl.num_programs(0)
    step, steps, e, begin, end, n, k = -1, 0, 0, 0, 0, 0, 0
    total_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for _ in range(0, mine):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += tl.num_programs(0)
            e, n, k = tile // tiles, tile % tiles // tiles_K * BLOCK_N, tile % tiles_K * BLOCK_K
            begin, end, steps = _group(offsets_ptr, e, BLOCK_R)
        row = begin + step * BLOCK_R
        grad_from, grad_row, a_from, a_row = grad_desc, row, a_desc, row
        if row + BLOCK_R > end:
            a_from, a_row = a_tail_desc, e * BLOCK_R
            # The rows that the step before has taken meet zeros in a.
            grad_row = end - BLOCK_R
            if step == 0:
                grad_from, grad_row = grad_tail_desc, e * BLOCK_R
        total_NK = tl.dot(tl.trans(grad_from.load([grad_row, n])), a_from.load([a_row, k]), total_NK)
        if step == steps - 1:
            dtype: tl.constexpr = out_desc.dtype
            left_NK, right_NK = _halves(total_NK)
            out_desc.store([e, n, k], left_NK.to(dtype).reshape(1, BLOCK_N, BLOCK_K // 2))
            out_desc.store([e, n, k + BLOCK_K // 2], right_NK.to(dtype).reshape(1, BLOCK_N, BLOCK_K // 2))
            total_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
