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
AHEAD = gl.constexpr(256)  # programs: of those tried, the fewest for which the next are not kept waiting

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # torch 2.11's Triton has the first

factor_of = gluon.jit(quantize_kernels.factor_of.fn)


@gluon.jit
def _bits(x):
    return gl.abs(x).to(gl.int32, bitcast=True)


@gluon.jit
def _load_rows(source, row, end, c_C, C, stride_r: gl.constexpr, CHOICES: gl.constexpr):
    """Rows from ``row`` on in fp32, zeros from ``end`` on. Only tokens of which CHOICES are made have scales."""
    x_ptr, x_scale_ptr, scale_stride_r, pair_ptr, _ = source
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
def _group(offsets_ptr, e):
    """Of a group its first row, its end and its blocks."""
    begin, end = gl.load(offsets_ptr + e - 1, mask=e > 0, other=0), gl.load(offsets_ptr + e)
    return begin, end, gl.maximum(gl.cdiv(end - begin, ROWS), 1)


@gluon.jit
def _blocks_ahead(offsets_ptr, e, E, E_P: gl.constexpr):
    """Those of all groups ahead of one."""
    e_E = gl.arange(0, E_P, ANY)
    start_E = gl.load(offsets_ptr + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    rows_E = gl.load(offsets_ptr + e_E, mask=e_E < E, other=0) - start_E
    return gl.sum(gl.where(e_E < e, gl.maximum(gl.cdiv(rows_E, ROWS), 1), 0), 0)


@gluon.jit
def _in_portions(i, work):
    """What program i has, and whether it turns it: 0 measured, 1 measured, 0 turned, 2 measured, 1 turned, ..., last turned."""
    portion, last = i // AHEAD, gl.cdiv(work, AHEAD) - 1
    turns = ((portion % 2 == 0) & (portion > 0)) | (portion == 2 * last + 1)
    turned = gl.where(portion == 2 * last + 1, last, portion // 2 - 1)
    return gl.where(turns, turned, (portion + 1) // 2) * AHEAD + i % AHEAD, turns


@gluon.jit
def _measure(source, bits_ptr, done_ptr, place, C, Z, stride_r: gl.constexpr, CHOICES: gl.constexpr):
    """Raises the largest magnitudes of a group's columns [C], as bits, to those of some of its blocks, then counts itself."""
    slab, e, z = place
    c_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    begin, end, blocks = _group(source[4], e)
    bits_C = gl.full([COLUMNS], 0, gl.int32, gl.SliceLayout(0, READ))
    for block in range(z, blocks, Z):
        x_RC = _load_rows(source, begin + block * ROWS, end, c_C, C, stride_r, CHOICES)
        bits_C = gl.maximum(bits_C, gl.max(_bits(x_RC), 0))
    gl.atomic_max(bits_ptr + c_C, bits_C, mask=c_C < C, sem="relaxed", scope="gpu")
    barrier()
    gl.atomic_add(done_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def _wait(done_ptr, Z):
    done = gl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    while done < Z:
        done = gl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    barrier()


@gluon.jit
def _turn(source, result, bits_ptr, place, C, E, W, Z, stride_r: gl.constexpr, CHOICES: gl.constexpr, E_P: gl.constexpr):
    """Quantises some of a group's blocks: by the largest magnitudes of its columns [C], or by each block's own."""
    BLOCKWISE: gl.constexpr = bits_ptr is None
    x_ptr, x_scale_ptr, scale_stride_r, pair_ptr, offsets_ptr = source
    out_ptr, scale_ptr, ends_ptr = result
    slab, e, z = place
    c_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    of_C = slab * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, WRITTEN))
    begin, end, blocks = _group(offsets_ptr, e)
    ahead = _blocks_ahead(offsets_ptr, e, E, E_P)
    if slab + z == 0:
        gl.store(ends_ptr + e, (ahead + blocks) * ROWS)
    if BLOCKWISE:
        factor_C = gl.full([COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, READ))
        if x_scale_ptr is not None:
            x_scale_ptr += slab * COLUMNS // 128
    else:
        factor_C = factor_of(gl.load(bits_ptr + c_C, mask=c_C < C, other=0), True)
        if z == 0:
            gl.store(scale_ptr + e * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
    source = (x_ptr, x_scale_ptr, scale_stride_r, pair_ptr, offsets_ptr)
    for block in range(z, blocks, Z):
        x_RC = _load_rows(source, begin + block * ROWS, end, c_C, C, stride_r, CHOICES)
        if BLOCKWISE:
            factor_C = factor_of(gl.max(_bits(x_RC), 0), False)
            gl.store(scale_ptr + gl.to_tensor(ahead + block).to(gl.int64) * C + c_C, gl.div_rn(1.0, factor_C), mask=c_C < C)
        turned_CR = gl.convert_layout(gl.permute(x_RC * factor_C[None, :], (1, 0)), WRITTEN)
        to_R = (ahead + block) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
        to_CR = out_ptr + of_C[:, None].to(gl.int64) * W + to_R[None, :]
        gl.store(to_CR, turned_CR.to(gl.float8e4nv), mask=(of_C < C)[:, None])


@gluon.jit
def _quantize_columns_kernel(
    x_ptr, x_scale_ptr, pair_ptr, offsets_ptr, bits_ptr, out_ptr, scale_ptr, ends_ptr, C, E, W,
    stride_r: gl.constexpr, scale_stride_r, Z, work,
    CHOICES: gl.constexpr, E_P: gl.constexpr,
):  # fmt: skip
    """Turns the columns of groups into rows of the result: 128 rows of 64 columns at a time, of a group by Z programs.

    Blockwise each such block has its own scales. Otherwise a column of a group has one, a power of two, for which the largest
    magnitude must be known first. So that the L2 cache still has what was measured when it is turned, AHEAD programs measure,
    then as many measure the next portion, then as many turn the first, and so on. In ``bits``, zeros, are the largest magnitudes
    [E * C], how many programs have measured a slab of a group [slabs * E], and how many have begun: their order is that of
    beginning, so that a program waits for none that has not; Z is AHEAD at most, for a group's last not to come after.
    """
    source, result = (x_ptr, x_scale_ptr, scale_stride_r, pair_ptr, offsets_ptr), (out_ptr, scale_ptr, ends_ptr)
    if bits_ptr is None:
        i = gl.program_id(0)
        _turn(source, result, None, (i // (E * Z), i // Z % E, i % Z), C, E, W, Z, stride_r, CHOICES, E_P)
    else:
        counts_ptr = bits_ptr + E * C
        order = gl.atomic_add(counts_ptr + gl.cdiv(C, COLUMNS) * E, 1, sem="relaxed", scope="gpu")
        i, turns = _in_portions(order, work)
        slab, e, z = i // (E * Z), i // Z % E, i % Z
        bits_ptr += e * C
        counts_ptr += slab * E + e
        if i < work:
            if turns:
                _wait(counts_ptr, Z)
                _turn(source, result, bits_ptr, (slab, e, z), C, E, W, Z, stride_r, CHOICES, E_P)
            else:
                _measure(source, bits_ptr, counts_ptr, (slab, e, z), C, Z, stride_r, CHOICES)
