"""The kernels behind :func:`kernels.quantize.quantize_columns`, in Gluon.

What turns a block without a detour: a thread holds 16 rows of four columns, so that half a warp reads a row's 64 numbers in one
piece, and the thread's part of a column is 16 bytes side by side on the way out, which its other half continues.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import quantize_kernels

WARPS = gl.constexpr(4)
ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
READ = gl.constexpr(gl.BlockedLayout([16, 4], [2, 16], [4, 1], [1, 0]))
WRITTEN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0]],
        lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[64, 128],
    )
)
ANY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

factor_of = gluon.jit(quantize_kernels.factor_of.fn)


@gluon.jit
def _bits(x):
    return gl.abs(x).to(gl.int32, bitcast=True)


@gluon.jit
def _load_rows(x_ptr, x_scale_ptr, pair_ptr, row, end, c_C, C, stride_r: gl.constexpr, scale_stride_r, CHOICES: gl.constexpr):
    """Rows from ``row`` on in fp32, zeros from ``end`` on. Only tokens of which CHOICES are made have scales."""
    r_R = gl.arange(0, ROWS, gl.SliceLayout(1, READ))
    mask_R = r_R < end - row
    if CHOICES:
        at_R = (gl.load(pair_ptr + row + r_R, mask=mask_R, other=0) // CHOICES).to(gl.int64)
    else:
        x_ptr += gl.to_tensor(row).to(gl.int64) * stride_r
        at_R = r_R
    x_RC = gl.load(x_ptr + at_R[:, None] * stride_r + c_C[None, :], mask=mask_R[:, None] & (c_C < C)[None, :], other=0.0)
    x_RC = x_RC.to(gl.float32)
    if x_scale_ptr is not None:
        x_RC *= gl.load(x_scale_ptr + at_R * scale_stride_r, mask=mask_R, other=0.0)[:, None]
    return x_RC


@gluon.jit
def _group(offsets_ptr, e, E, E_P: gl.constexpr):
    """Of a group its first row and its end, its blocks, and those of all groups ahead of it."""
    e_E = gl.arange(0, E_P, ANY)
    start_E = gl.load(offsets_ptr + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    rows_E = gl.load(offsets_ptr + e_E, mask=e_E < E, other=0) - start_E
    ahead = gl.sum(gl.where(e_E < e, gl.maximum(gl.cdiv(rows_E, ROWS), 1), 0), 0)
    begin, end = gl.load(offsets_ptr + e - 1, mask=e > 0, other=0), gl.load(offsets_ptr + e)
    return begin, end, gl.maximum(gl.cdiv(end - begin, ROWS), 1), ahead


@gluon.jit
def _column_bits_kernel(
    x_ptr, x_scale_ptr, pair_ptr, offsets_ptr, bits_ptr, C, stride_r: gl.constexpr, scale_stride_r,
    CHOICES: gl.constexpr,
):  # fmt: skip
    """The largest magnitude of each column of a group [E, C], as bits, which are zero before."""
    e, c_C = gl.program_id(1), gl.program_id(0) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    begin, end = gl.load(offsets_ptr + e - 1, mask=e > 0, other=0), gl.load(offsets_ptr + e)
    bits_C = gl.full([COLUMNS], 0, gl.int32, gl.SliceLayout(0, READ))
    for block in range(gl.program_id(2), gl.cdiv(end - begin, ROWS), gl.num_programs(2)):
        row = begin + block * ROWS
        x_RC = _load_rows(x_ptr, x_scale_ptr, pair_ptr, row, end, c_C, C, stride_r, scale_stride_r, CHOICES)
        bits_C = gl.maximum(bits_C, gl.max(_bits(x_RC), 0))
    gl.atomic_max(bits_ptr + e * C + c_C, bits_C, mask=c_C < C, sem="relaxed", scope="gpu")


@gluon.jit
def _quantize_columns_kernel(
    x_ptr, x_scale_ptr, pair_ptr, offsets_ptr, bits_ptr, out_ptr, scale_ptr, ends_ptr, C, E, W,
    stride_r: gl.constexpr, scale_stride_r,
    CHOICES: gl.constexpr, E_P: gl.constexpr,
):  # fmt: skip
    """Turns 128 rows of some columns of a group into rows of the result, blocks that follow each other by several programs.

    With ``bits``, the largest magnitudes [E, C], a column of a group has one scale, a power of two; else one in every block.
    """
    BLOCKWISE: gl.constexpr = bits_ptr is None
    e, first_c = gl.program_id(1), gl.program_id(0) * COLUMNS
    c_C = first_c + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    of_C = first_c + gl.arange(0, COLUMNS, gl.SliceLayout(1, WRITTEN))
    begin, end, blocks, ahead = _group(offsets_ptr, e, E, E_P)
    if gl.program_id(0) + gl.program_id(2) == 0:
        gl.store(ends_ptr + e, (ahead + blocks) * ROWS)
    if BLOCKWISE:
        factor_C = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, READ))
        if x_scale_ptr is not None:
            # All of a program's columns are of one block of 128.
            x_scale_ptr += first_c // 128
    else:
        factor_C = factor_of(gl.load(bits_ptr + e * C + c_C, mask=c_C < C, other=0), True)
        if gl.program_id(2) == 0:
            gl.store(scale_ptr + e * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
    for block in range(gl.program_id(2), blocks, gl.num_programs(2)):
        row = begin + block * ROWS
        x_RC = _load_rows(x_ptr, x_scale_ptr, pair_ptr, row, end, c_C, C, stride_r, scale_stride_r, CHOICES)
        if BLOCKWISE:
            factor_C = factor_of(gl.max(_bits(x_RC), 0), False)
            gl.store(scale_ptr + gl.to_tensor(ahead + block).to(gl.int64) * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
        turned_CR = gl.convert_layout(gl.permute(x_RC * factor_C[None, :], (1, 0)), WRITTEN)
        to_R = (ahead + block) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        to_CR = out_ptr + of_C[:, None].to(gl.int64) * W + to_R[None, :]
        gl.store(to_CR, turned_CR.to(gl.float8e4nv), mask=(of_C < C)[:, None])
