"""The kernels of :mod:`kernels.grouped_mm_fp8`, in Gluon, for Hopper.

A program is one warp that has blocks of both operands copied into a ring of stages in shared memory, and one or two consumers,
four warps each, that multiply. The consumers share 128 rows of the left operand; each has 128 columns of its own. Nothing but
the barriers of a stage ties them together: while one consumer scales a product and adds it up, the tensor cores are the other's.
A barrier completes a phase when a stage is full or empty, and the phases' parities are counted alike on both sides.

A consumer multiplies 64 rows at a time, because two such sums and one product fill its registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(128)
HALF = gl.constexpr(64)
# Of a product in the registers of a consumer.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# Of results on the way from shared memory, 16 bytes a thread.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _ring(a_desc, b_desc, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, LOADS: gl.constexpr):
    """Stages, with a barrier for LOADS arrivals that says that it is full and one of the consumers that says that it is empty."""
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK, BLOCK], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES * CONSUMERS, BLOCK, BLOCK], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), LOADS)
        mbarrier.init(empty.index(stage), CONSUMERS)
    return a_ring, b_ring, full, empty


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def _multiply(a, b, product_MN):
    """a @ b^T into the registers of a product that is no longer needed: ptxas would take others, of which there are none."""
    product_MN = warpgroup_mma(a, b.permute((1, 0)), product_MN, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product_MN])


@gluon.jit
def _halves(x_MN):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x_MN, (x_MN.shape[0], 2, x_MN.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _send(out_desc, place, x_MN, row, n, PENDING: gl.constexpr):
    """Stores through a place in shared memory which all but the last PENDING stores have left."""
    tma.store_wait(PENDING)
    place.store(x_MN)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, n], place)


@gluon.jit
def _store_rows(out, consumer, total_MN, row, end, n, N, PLACES: gl.constexpr):
    """Whole halves go out asynchronously, through PLACES (1 or 2) of a consumer in turn; a group's last is cut off at its end."""
    room, out_desc, out_ptr = out
    left_MN, right_MN = _halves(total_MN.to(out_desc.dtype))
    for i in gl.static_range(2):
        x_MN = left_MN if i == 0 else right_MN
        place, at = room.index(consumer * PLACES + i % PLACES), n + i * HALF
        if row + HALF <= end:
            _send(out_desc, place, x_MN, row, at, PLACES - 1)
        else:
            tma.store_wait(0)
            place.store(x_MN)
            row_M = row + gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
            n_N = at + gl.arange(0, HALF, gl.SliceLayout(0, ROWS))
            to_MN = out_ptr + row_M.to(gl.int64)[:, None] * N + n_N[None, :]
            gl.store(to_MN, place.load(ROWS), mask=(row_M < end)[:, None] & (n_N < N)[None, :])


@gluon.jit
def _load_rows(
    ring, scales, operands, a_scale_ptr, b_scale_ptr, offsets_ptr, E, K, N, R, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):
    a_ring, b_ring, full, empty = ring
    a_scales, b_scales = scales
    a_desc, b_desc = operands
    BYTES: gl.constexpr = a_desc.block_type.nbytes + CONSUMERS * b_desc.block_type.nbytes
    tiles_N = gl.cdiv(N, CONSUMERS * BLOCK)
    stage, phase, begin, tile = 0, 0, 0, gl.program_id(0)
    for e in range(E):
        end = gl.load(offsets_ptr + e)
        tiles = gl.cdiv(end - begin, BLOCK) * tiles_N
        while tile < tiles:
            row = begin + tile // tiles_N * BLOCK
            n = tile % tiles_N * (CONSUMERS * BLOCK)
            # Whatever is read outside of the group or the matrix is not stored.
            a_scale_at = a_scale_ptr + gl.minimum(row + gl.arange(0, BLOCK, ONE_WARP), R - 1)
            for k in range(0, K, BLOCK):
                a_scale_M = gl.load(a_scale_at)
                a_scale_at += R
                b_scale_at = b_scale_ptr + e * (N // BLOCK) * (K // BLOCK) + k // BLOCK + gl.arange(0, 1, ONE_WARP)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, BYTES)
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_ring.index(stage))
                for i in gl.static_range(CONSUMERS):
                    b = b_ring.index(stage * CONSUMERS + i)
                    tma.async_copy_global_to_shared(b_desc, [e * N + n + i * BLOCK, k], bar, b)
                for i in gl.static_range(CONSUMERS):
                    block = gl.minimum(n // BLOCK + i, N // BLOCK - 1)
                    b_scales.index(stage * CONSUMERS + i).store(gl.load(b_scale_at + block * (K // BLOCK)))
                a_scales.index(stage).store(a_scale_M)
                mbarrier.arrive(bar)
                stage, phase = _next(stage, phase, STAGES)
            tile += gl.num_programs(0)
        tile -= tiles
        begin = end


@gluon.jit
def _sums(ring, scales, stage, phase, K, consumer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr):
    """A tile's upper and lower half, of which HALVES are computed, and the stage and the phase after it."""
    a_ring, b_ring, full, empty = ring
    a_scales, b_scales = scales
    upper_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    lower_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    product_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    for _ in range(K // BLOCK):
        mbarrier.wait(full.index(stage), phase)
        at = stage * CONSUMERS + consumer
        a, b, a_scale = a_ring.index(stage), b_ring.index(at), a_scales.index(stage)
        b_scale = b_scales.index(at).load(gl.SliceLayout(1, PRODUCT))
        upper_scale_M = a_scale.slice(0, HALF).load(gl.SliceLayout(1, PRODUCT)) * b_scale
        lower_scale_M = a_scale.slice(HALF, HALF).load(gl.SliceLayout(1, PRODUCT)) * b_scale
        product_MN = _multiply(a.slice(0, HALF), b, product_MN)
        upper_MN += product_MN * upper_scale_M[:, None]
        if HALVES == 2:
            product_MN = _multiply(a.slice(HALF, HALF), b, product_MN)
        mbarrier.arrive(empty.index(stage))
        if HALVES == 2:
            lower_MN += product_MN * lower_scale_M[:, None]
        stage, phase = _next(stage, phase, STAGES)
    return upper_MN, lower_MN, stage, phase


@gluon.jit
def _multiply_rows(ring, scales, out, offsets_ptr, E, K, N, consumer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    tiles_N = gl.cdiv(N, CONSUMERS * BLOCK)
    stage, phase, begin, tile = 0, 0, 0, gl.program_id(0)
    for e in range(E):
        end = gl.load(offsets_ptr + e)
        tiles = gl.cdiv(end - begin, BLOCK) * tiles_N
        while tile < tiles:
            row = begin + tile // tiles_N * BLOCK
            n = (tile % tiles_N * CONSUMERS + consumer) * BLOCK
            if row + HALF < end:
                upper_MN, lower_MN, stage, phase = _sums(ring, scales, stage, phase, K, consumer, CONSUMERS, STAGES, 2)
            else:  # nothing of the lower half would be stored
                upper_MN, lower_MN, stage, phase = _sums(ring, scales, stage, phase, K, consumer, CONSUMERS, STAGES, 1)
            _store_rows(out, consumer, upper_MN, row, end, n, N, CONSUMERS)
            _store_rows(out, consumer, lower_MN, row + HALF, end, n, N, CONSUMERS)
            tile += gl.num_programs(0)
        tile -= tiles
        begin = end
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "R"])
def _grouped_mm_blockwise_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, out_ptr, offsets_ptr, E, K, N, R,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[r] = a[r] @ b[e]^T for the rows r of group e; 128 numbers of a row of a, and 128 x 128 of b, have a scale.

    Tiles of all groups are numbered, columns first; a program takes every tile that lies a whole grid after its last one.
    """
    ring = _ring(a_desc, b_desc, CONSUMERS, STAGES, 2)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], SCALES)
    b_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, 1], SCALES)
    scales = (a_scales, b_scales)
    room = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * CONSUMERS, HALF, HALF], out_desc.layout)
    operands, out = (a_desc, b_desc), (room, out_desc, out_ptr)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_multiply_rows, (ring, scales, out, offsets_ptr, E, K, N, 0, CONSUMERS, STAGES)),
            (_multiply_rows, (ring, scales, out, offsets_ptr, E, K, N, 1, CONSUMERS, STAGES)),
            (_load_rows, (ring, scales, operands, a_scale_ptr, b_scale_ptr, offsets_ptr, E, K, N, R, CONSUMERS, STAGES)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_multiply_rows, (ring, scales, out, offsets_ptr, E, K, N, 0, CONSUMERS, STAGES)),
            (_load_rows, (ring, scales, operands, a_scale_ptr, b_scale_ptr, offsets_ptr, E, K, N, R, CONSUMERS, STAGES)),
        ], [1], [32])
    # fmt: on


@gluon.jit
def _load_columns(ring, scales, operands, ends_ptr, E, N, K, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    grad_ring, a_ring, full, empty = ring
    grad_scales, a_scales = scales
    grad_desc, a_desc, grad_scale_desc, a_scale_desc = operands
    GRAD: gl.constexpr = grad_desc.block_type.nbytes + grad_scale_desc.block_type.nbytes
    BYTES: gl.constexpr = GRAD + CONSUMERS * (a_desc.block_type.nbytes + a_scale_desc.block_type.nbytes)
    tiles_K = gl.cdiv(K, CONSUMERS * BLOCK)
    tiles = N // BLOCK * tiles_K
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), E * tiles, gl.num_programs(0)):
        e, n, k = tile // tiles, tile % tiles // tiles_K * BLOCK, tile % tiles_K * (CONSUMERS * BLOCK)
        first = gl.load(ends_ptr + e - 1, mask=e > 0, other=0) // BLOCK
        for block in range(first, gl.load(ends_ptr + e) // BLOCK):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(grad_desc, [n, block * BLOCK], bar, grad_ring.index(stage))
            tma.async_copy_global_to_shared(grad_scale_desc, [block, n], bar, grad_scales.index(stage))
            for i in gl.static_range(CONSUMERS):
                at = stage * CONSUMERS + i
                tma.async_copy_global_to_shared(a_desc, [k + i * BLOCK, block * BLOCK], bar, a_ring.index(at))
                tma.async_copy_global_to_shared(a_scale_desc, [block, k + i * BLOCK], bar, a_scales.index(at))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _store_columns(out_desc, place, total_NK, row, k):
    left_NK, right_NK = _halves(total_NK.to(out_desc.dtype))
    _send(out_desc, place, left_NK, row, k, 0)
    _send(out_desc, place, right_NK, row, k + HALF, 0)


@gluon.jit
def _multiply_columns(ring, scales, room, out_desc, ends_ptr, E, N, K, consumer, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    grad_ring, a_ring, full, empty = ring
    grad_scales, a_scales = scales
    place = room.index(consumer)
    tiles_K = gl.cdiv(K, CONSUMERS * BLOCK)
    tiles = N // BLOCK * tiles_K
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), E * tiles, gl.num_programs(0)):
        e, n, k = tile // tiles, tile % tiles // tiles_K * BLOCK, (tile % tiles_K * CONSUMERS + consumer) * BLOCK
        upper_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        lower_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        product_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        first = gl.load(ends_ptr + e - 1, mask=e > 0, other=0) // BLOCK
        for _ in range(first, gl.load(ends_ptr + e) // BLOCK):
            mbarrier.wait(full.index(stage), phase)
            at = stage * CONSUMERS + consumer
            grad, a, a_scale = grad_ring.index(stage), a_ring.index(at), a_scales.index(at)
            grad_scale = grad_scales.index(stage).permute((1, 0))
            upper_scale, lower_scale = grad_scale.slice(0, HALF).load(PRODUCT), grad_scale.slice(HALF, HALF).load(PRODUCT)
            # Scales of a are read where they are used: a thread has 32 of them.
            product_NK = _multiply(grad.slice(0, HALF), a, product_NK)
            upper_NK += product_NK * upper_scale * a_scale.load(PRODUCT)
            product_NK = _multiply(grad.slice(HALF, HALF), a, product_NK)
            lower_NK += product_NK * lower_scale * a_scale.load(PRODUCT)
            mbarrier.arrive(empty.index(stage))
            stage, phase = _next(stage, phase, STAGES)
        _store_columns(out_desc, place, upper_NK, e * N + n, k)
        _store_columns(out_desc, place, lower_NK, e * N + n + HALF, k)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def _weight_grad_blockwise_kernel(
    grad_desc, a_desc, grad_scale_desc, a_scale_desc, out_desc, ends_ptr, E, N, K,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[e] = grad[:, columns of e] @ a[:, columns of e]^T, [N, K]; 128 numbers of a row of either have a scale.

    Groups end at multiples of 128 and are not empty.
    """
    ring = _ring(grad_desc, a_desc, CONSUMERS, STAGES, 1)
    grad_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], grad_scale_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, 1, BLOCK], a_scale_desc.layout)
    scales, operands = (grad_scales, a_scales), (grad_desc, a_desc, grad_scale_desc, a_scale_desc)
    room = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, HALF, HALF], out_desc.layout)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_multiply_columns, (ring, scales, room, out_desc, ends_ptr, E, N, K, 0, CONSUMERS, STAGES)),
            (_multiply_columns, (ring, scales, room, out_desc, ends_ptr, E, N, K, 1, CONSUMERS, STAGES)),
            (_load_columns, (ring, scales, operands, ends_ptr, E, N, K, CONSUMERS, STAGES)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_multiply_columns, (ring, scales, room, out_desc, ends_ptr, E, N, K, 0, CONSUMERS, STAGES)),
            (_load_columns, (ring, scales, operands, ends_ptr, E, N, K, CONSUMERS, STAGES)),
        ], [1], [32])
    # fmt: on
