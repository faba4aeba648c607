"""The kernel behind :func:`kernels.turn_rows.turn_rows`, in Gluon.

What turns a block without a detour: a thread holds 16 rows of as many columns as have eight bytes, so that half a warp reads 128
bytes of a row in one piece, and the thread's part of a column is 16 bytes side by side on the way out, which its other half
continues.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.group_pieces import ROWS, groups, in_a_warp, place_of, store_end


def columns(itemsize: int) -> int:
    """Of a block of numbers of so many bytes."""
    return 128 // itemsize


@gluon.constexpr_function
def _read_layout(columns):
    return gl.BlockedLayout([16, columns // 16], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _written_layout(columns):
    mine = columns // 16
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]] + [[1 << i, 0] for i in range(mine.bit_length() - 1)],
        lane_bases=[[mine << i, 0] for i in range(4)] + [[0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[columns, 128],
    )


@gluon.jit
def _places(pair_ptr, row, end, LAYOUT: gl.constexpr, CHOICES: gl.constexpr):
    """Where 128 rows from ``row`` on stand, and which of them lie before ``end``."""
    r_R = gl.arange(0, ROWS, LAYOUT)
    mask_R = r_R < end - row
    if CHOICES:
        return (gl.load(pair_ptr + row + r_R, mask=mask_R, other=0) // CHOICES).to(gl.int64), mask_R
    return gl.to_tensor(row).to(gl.int64) + r_R, mask_R


@gluon.jit
def _largest_scale(scale_ptr, scale_stride_r, pair_ptr, row, end, CHOICES: gl.constexpr):
    """By bits, of which those of NaN are the largest; 1 if there is no row."""
    at_R, mask_R = _places(pair_ptr, row, end, in_a_warp(ROWS), CHOICES)
    scale_R = gl.load(scale_ptr + at_R * scale_stride_r, mask=mask_R, other=0.0)
    bits = gl.max(gl.abs(scale_R).to(gl.int32, bitcast=True), 0)  # NaN may have a sign
    return gl.to_tensor(gl.where(bits == 0, 0x3F800000, bits)).to(gl.float32, bitcast=True)


@gluon.jit
def _elements(x_RC, scale_R):
    """Of rows that are not quantised yet, by their scales; a scale of 0 stands for no row."""
    if x_RC.dtype == gl.float8e4nv:
        return x_RC
    factor_R = gl.where(scale_R == 0, 0.0, gl.div_rn(1.0, scale_R))
    return (x_RC.to(gl.float32) * factor_R[:, None]).to(gl.float8e4nv)


@gluon.jit
def _turn_piece(source, result, slab, place, C, W, stride_r: gl.constexpr, CHOICES: gl.constexpr, COLUMNS: gl.constexpr):
    READ: gl.constexpr = _read_layout(COLUMNS)
    WRITTEN: gl.constexpr = _written_layout(COLUMNS)
    x_ptr, x_scale_ptr, scale_stride_r, pair_ptr = source
    out_ptr, scale_ptr, ends_ptr = result
    e, begin, end, _, block, behind, ahead = place
    if slab + block == 0:
        store_end(ends_ptr, e, begin, end, ahead)
    c_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    of_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, WRITTEN))
    for at in range(block, behind):
        row = begin + at * ROWS
        at_R, mask_R = _places(pair_ptr, row, end, gl.SliceLayout(1, READ), CHOICES)
        mask_RC = mask_R[:, None] & (c_C < C)[None, :]
        x_RC = gl.load(x_ptr + at_R[:, None] * stride_r + c_C[None, :], mask=mask_RC, other=0.0)
        scale_R = gl.load(x_scale_ptr + at_R * scale_stride_r, mask=mask_R, other=0.0)
        largest = _largest_scale(x_scale_ptr, scale_stride_r, pair_ptr, row, end, CHOICES)
        if slab == 0:
            gl.store(scale_ptr + ahead + at, largest)
        # Exact, but for what is less than half of E4M3's smallest number.
        x_RC = _elements(x_RC, scale_R).to(gl.float16) * (scale_R * gl.div_rn(1.0, largest)).to(gl.float16)[:, None]
        turned_CR = gl.convert_layout(gl.permute(x_RC, (1, 0)), WRITTEN)
        to_R = (ahead + at) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        to_CR = out_ptr + of_C[:, None].to(gl.int64) * W + to_R[None, :]
        gl.store(to_CR, turned_CR.to(gl.float8e4nv), mask=(of_C < C)[:, None])


@gluon.jit
def _turn_rows_kernel(
    x_ptr, x_scale_ptr, pair_ptr, offsets_ptr, out_ptr, scale_ptr, ends_ptr, C, E, W,
    stride_r: gl.constexpr, scale_stride_r,
    CHOICES: gl.constexpr, E_P: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Turns the rows of groups, 128 rows of a slab of columns at a time, whose elements become multiples of their largest scale.

    Columns go slab by slab, each of all groups, so that the L2 cache has the part of a token that several rows are made of.
    """
    source, result = (x_ptr, x_scale_ptr, scale_stride_r, pair_ptr), (out_ptr, scale_ptr, ends_ptr)
    _, _, _, pieces_E = groups(offsets_ptr, E, E_P)
    pieces, slabs = gl.sum(pieces_E, 0), gl.cdiv(C, COLUMNS)
    for i in range(gl.program_id(0), slabs * pieces, gl.num_programs(0)):
        _turn_piece(source, result, i // pieces, place_of(offsets_ptr, i % pieces, E, E_P), C, W, stride_r, CHOICES, COLUMNS)
