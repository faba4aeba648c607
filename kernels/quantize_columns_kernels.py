"""The kernels behind :func:`kernels.quantize.quantize_columns`, in Gluon.

What turns a block without a detour: a thread holds 16 rows of four columns, so that half a warp reads a row's 64 numbers in one
piece, and the thread's part of a column is 16 bytes side by side on the way out, which its other half continues.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import quantize_kernels
from kernels.group_pieces import ROWS, groups, place_of, store_end

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
AHEAD = gl.constexpr(256)  # pieces

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # torch 2.11's Triton has the first

factor_of = gluon.jit(quantize_kernels.factor_of.fn)


@gluon.jit
def _bits(x):
    return gl.abs(x).to(gl.int32, bitcast=True)


@gluon.jit
def _load_rows(source, row, end, c_C, C, stride_r: gl.constexpr, CHOICES: gl.constexpr):
    """Rows from ``row`` on in fp32, zeros from ``end`` on. Only tokens of which CHOICES are made have scales."""
    x_ptr, x_scale_ptr, scale_stride_r, pair_ptr = source
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
        # All columns are of one block of 128, if there is more than one.
        x_RC *= gl.load(x_scale_ptr + at_R * scale_stride_r, mask=mask_R, other=0.0)[:, None]
    return x_RC


@gluon.jit
def _in_portions(order, work, portion):
    """What comes in this order, and whether it is to be turned: portion 0 measured, 1 measured, 0 turned, 2 measured, ..."""
    at, last = order // portion, gl.cdiv(work, portion) - 1
    turns = ((at % 2 == 0) & (at > 0)) | (at == 2 * last + 1)
    turned = gl.where(at == 2 * last + 1, last, at // 2 - 1)
    return gl.where(turns, turned, (at + 1) // 2) * portion + order % portion, turns


@gluon.jit
def _measure(source, bits_ptr, done_ptr, slab, place, C, stride_r: gl.constexpr, CHOICES: gl.constexpr):
    """Raises the largest magnitudes of a group's columns [C], as bits, to those of a piece, which it counts then."""
    _, begin, end, _, block, behind, _ = place
    c_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    bits_C = gl.full([COLUMNS], 0, gl.int32, gl.SliceLayout(0, READ))
    for at in range(block, behind):
        x_RC = _load_rows(source, begin + at * ROWS, end, c_C, C, stride_r, CHOICES)
        bits_C = gl.maximum(bits_C, gl.max(_bits(x_RC), 0))
    gl.atomic_max(bits_ptr + c_C, bits_C, mask=c_C < C, sem="relaxed", scope="gpu")
    barrier()
    gl.atomic_add(done_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def _wait(done_ptr, pieces):
    done = gl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    while done < pieces:
        done = gl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    barrier()


@gluon.jit
def _turn(source, result, bits_ptr, slab, place, C, W, stride_r: gl.constexpr, CHOICES: gl.constexpr):
    """Quantises a piece: by the largest magnitudes of the group's columns [C], or by each block's own."""
    BLOCKWISE: gl.constexpr = bits_ptr is None
    x_ptr, x_scale_ptr, scale_stride_r, pair_ptr = source
    out_ptr, scale_ptr, ends_ptr = result
    e, begin, end, _, block, behind, ahead = place
    c_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    of_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, WRITTEN))
    if slab + block == 0:
        store_end(ends_ptr, e, begin, end, ahead)
    if BLOCKWISE:
        factor_C = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, READ))
        if x_scale_ptr is not None:
            x_scale_ptr += slab * COLUMNS // 128
    else:
        factor_C = factor_of(gl.load(bits_ptr + c_C, mask=c_C < C, other=0), True)
        if block == 0:
            gl.store(scale_ptr + e * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
    source = (x_ptr, x_scale_ptr, scale_stride_r, pair_ptr)
    for at in range(block, behind):
        x_RC = _load_rows(source, begin + at * ROWS, end, c_C, C, stride_r, CHOICES)
        if BLOCKWISE:
            factor_C = factor_of(gl.max(_bits(x_RC), 0), False)
            gl.store(scale_ptr + gl.to_tensor(ahead + at).to(gl.int64) * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
        turned_CR = gl.convert_layout(gl.permute(x_RC * factor_C[None, :], (1, 0)), WRITTEN)
        to_R = (ahead + at) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        to_CR = out_ptr + of_C[:, None].to(gl.int64) * W + to_R[None, :]
        gl.store(to_CR, turned_CR.to(gl.float8e4nv), mask=(of_C < C)[:, None])


@gluon.jit
def _quantize_columns_kernel(
    x_ptr, x_scale_ptr, pair_ptr, offsets_ptr, bits_ptr, out_ptr, scale_ptr, ends_ptr, C, E, W,
    stride_r: gl.constexpr, scale_stride_r,
    CHOICES: gl.constexpr, E_P: gl.constexpr,
):  # fmt: skip
    """Turns the columns of groups into rows of the result: 128 rows of 64 columns at a time, as many groups' as there are.

    Blockwise each such block has its own scales. Otherwise a column of a group has one, a power of two, for which the largest
    magnitude must be known first. So that the L2 cache still has what was measured when it is turned, a portion of the pieces is
    measured, then the next portion, then the first is turned, and so on. No portion is smaller than a group, for all of a group
    to be measured by then. In ``bits``, zeros, are the largest magnitudes [E * C], how many of a group's pieces are measured
    [slabs * E], and how many pieces programs have taken: in this order, so that they wait for none that is not begun.
    """
    source, result = (x_ptr, x_scale_ptr, scale_stride_r, pair_ptr), (out_ptr, scale_ptr, ends_ptr)
    _, _, _, pieces_E = groups(offsets_ptr, E, E_P)
    pieces, slabs = gl.sum(pieces_E, 0), gl.cdiv(C, COLUMNS)
    if bits_ptr is None:
        for i in range(gl.program_id(0), slabs * pieces, gl.num_programs(0)):
            place = place_of(offsets_ptr, i % pieces, E, E_P)
            _turn(source, result, None, i // pieces, place, C, W, stride_r, CHOICES)
    else:
        counts_ptr = bits_ptr + E * C
        portion = gl.maximum(gl.max(pieces_E, 0), AHEAD)
        orders = 2 * gl.cdiv(slabs * pieces, portion) * portion
        order = gl.atomic_add(counts_ptr + slabs * E, 1, sem="relaxed", scope="gpu")
        while order < orders:
            i, turns = _in_portions(order, slabs * pieces, portion)
            if i < slabs * pieces:
                slab, place = i // pieces, place_of(offsets_ptr, i % pieces, E, E_P)
                done_ptr, of_group_ptr = counts_ptr + slab * E + place[0], bits_ptr + place[0] * C
                if turns:
                    _wait(done_ptr, place[3])
                    _turn(source, result, of_group_ptr, slab, place, C, W, stride_r, CHOICES)
                else:
                    _measure(source, of_group_ptr, done_ptr, slab, place, C, stride_r, CHOICES)
            order = gl.atomic_add(counts_ptr + slabs * E, 1, sem="relaxed", scope="gpu")
