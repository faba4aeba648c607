"""What the warp-specialised kernels for Hopper share, in Gluon.

A program is one warp that has blocks of both operands copied into a ring of stages in shared memory, and two consumers, four
warps each, that multiply. One operand's block of a stage is read by both consumers, of the other each has a block of its own.
Nothing but the barriers of a stage ties them together: while one consumer is busy with its sums, the tensor cores are the
other's. A barrier completes a phase when a stage is full or empty, and the phases' parities are counted alike on both sides.

The warp that loads takes the number of its next tile from a counter when it is about to load it, so that a program whose
multiprocessor is another kernel's for a while leaves its work to the others, and hands over what consumers must know of the tile
with its first stage. A counter is zero between launches: the program that took the last number sets it back.

A kernel starts with 168 registers a thread in 12 warps, four for each consumer and four of which one loads. These give the
consumers what they need not: 232 * 8 + 40 * 4 = 168 * 12.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

CONSUMERS = gl.constexpr(2)
STAGES = gl.constexpr(4)
BLOCK = gl.constexpr(128)
HALF = gl.constexpr(64)
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def rows_layout(dtype):
    """Of blocks on the way out of shared memory, 16 bytes a thread and 128 a row."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [4, 8], [4, 1], [1, 0])


@gluon.jit
def make_ring(shared_desc, own_desc, LOADS: gl.constexpr):
    """Stages, with a barrier for LOADS arrivals that says that it is full and one of the consumers that says that it is empty.

    A stage has room for what there is to know of the tile that begins with it. All barriers are waited for to the end: the memory
    of one that is not would be given to blocks on their way out, where its first state, written late, overwrites numbers.
    """
    shared = gl.allocate_shared_memory(shared_desc.dtype, [STAGES] + shared_desc.block_type.shape, shared_desc.layout)
    own = gl.allocate_shared_memory(own_desc.dtype, [STAGES * CONSUMERS] + own_desc.block_type.shape, own_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), LOADS)
        mbarrier.init(empty.index(stage), CONSUMERS)
    known = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 1], IN_ORDER)
    return shared, own, full, empty, known


@gluon.jit
def draw(counter_ptr, pred):
    """Has the next number of a counter fetched if ``pred``; :func:`drawn` waits for it.

    It is relaxed, since nothing but the counter itself is read or written by it.
    """
    lane = gl.arange(0, 32, ONE_WARP)
    one = gl.full([32], 1, gl.int32, ONE_WARP)
    return gl.atomic_add(counter_ptr + lane, one, mask=(lane == 0) & pred, sem="relaxed", scope="gpu")


@gluon.jit
def drawn(number):
    return gl.sum(gl.where(gl.arange(0, 32, ONE_WARP) == 0, number, 0), 0)


@gluon.jit
def first_tile(counter_ptr):
    """Drawn as well: a program that comes late must not find a tile that nobody else may take."""
    return drawn(draw(counter_ptr, True))


@gluon.jit
def pair(upper, lower):
    """Of numbers under 2^15 and 2^16: consumers keep it through a tile, in registers, which are scarce."""
    return (upper << 16) + lower


@gluon.jit
def halves_of(numbers):
    return numbers >> 16, numbers & 0xFFFF


@gluon.jit
def hand_over(ring, stage, phase, tile):
    """Tells the consumers three numbers of a tile once its first stage is empty; that stage's arrivals follow."""
    _, _, _, empty, known = ring
    mbarrier.wait(empty.index(stage), phase ^ 1)
    for i in gl.static_range(3):
        known.index(stage * 4 + i).store(gl.full([1], tile[i], gl.int32, ONE_WARP))


@gluon.jit
def _number(known, stage, i):
    return gl.sum(known.index(stage * 4 + i).load(FOUR_WARPS), 0)


@gluon.jit
def take_over(ring, stage, phase):
    """What a tile was handed over with, once its first stage is full."""
    _, _, full, _, known = ring
    mbarrier.wait(full.index(stage), phase)
    return _number(known, stage, 0), _number(known, stage, 1), _number(known, stage, 2)


@gluon.jit
def end_tiles(ring, stage, phase, counter_ptr, past, none, LOADS: gl.constexpr):
    """Hands over ``none``, by which consumers know that there are no more tiles, with a stage that has no data.

    ``past`` is by how much the number that this program found no tile for lies past the last tile's. Every tile and every program
    took a number, so the greatest is the one that lies ``num_programs - 1`` past; when it is known, all are taken.
    """
    _, _, full, _, _ = ring
    hand_over(ring, stage, phase, none)
    mbarrier.arrive(full.index(stage), count=LOADS)
    lane = gl.arange(0, 32, ONE_WARP)
    last = past == gl.num_programs(0) - 1
    zero = gl.full([32], 0, gl.int32, ONE_WARP)
    gl.atomic_xchg(counter_ptr + lane, zero, mask=(lane == 0) & last, sem="relaxed", scope="gpu")


@gluon.jit
def next_stage(stage, phase):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def halves(x_MN):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x_MN, (x_MN.shape[0], 2, x_MN.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def store_block(out_desc, out_ptr, place, x_MN, row, end, n, N, PENDING: gl.constexpr):
    """Stores a block, its rows 128 bytes, through a place in shared memory which all but the last PENDING stores have left.

    Whole blocks go out asynchronously; one whose rows do not all lie before ``end`` is cut off there.
    """
    if row + x_MN.shape[0] <= end:
        tma.store_wait(PENDING)
        place.store(x_MN)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, n], place)
    else:
        tma.store_wait(0)
        place.store(x_MN)
        ROWS: gl.constexpr = rows_layout(x_MN.dtype)
        row_M = row + gl.arange(0, x_MN.shape[0], gl.SliceLayout(1, ROWS))
        n_N = n + gl.arange(0, x_MN.shape[1], gl.SliceLayout(0, ROWS))
        to_MN = out_ptr + row_M.to(gl.int64)[:, None] * N + n_N[None, :]
        gl.store(to_MN, place.load(ROWS), mask=(row_M < end)[:, None] & (n_N < N)[None, :])
