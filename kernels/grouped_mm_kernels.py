"""The Triton kernel of :mod:`kernels.grouped_mm`."""

import triton
import triton.language as tl


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
        # Half a tile at a time needs half of the shared memory on the way out.
        HALF: tl.constexpr = total_MN.shape[1] // 2
        left_MN, right_MN = tl.split(tl.permute(tl.reshape(total_MN, (total_MN.shape[0], 2, HALF)), (0, 2, 1)))
        _store_rows(out_desc, out_ptr, left_MN.to(dtype), row, end, n, N)
        _store_rows(out_desc, out_ptr, right_MN.to(dtype), row, end, n + HALF, N)
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
