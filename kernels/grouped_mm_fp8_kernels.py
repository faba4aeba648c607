"""The blockwise kernels of :mod:`kernels.grouped_mm_fp8`, and both of its weight gradient, in Gluon, for Hopper.

See :mod:`kernels.ring_kernels`. The consumers share 128 rows of the left operand; each has 128 columns of its own, and while it
scales a product and adds it up, the tensor cores are the other's. A consumer multiplies 64 rows at a time, because two such sums
and one product fill its registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.ring_kernels import (
    BLOCK,
    CONSUMERS,
    HALF,
    IN_ORDER,
    ONE_WARP,
    STAGES,
    draw,
    drawn,
    end_tiles,
    first_tile,
    halves,
    halves_of,
    hand_over,
    make_ring,
    next_stage,
    pair,
    store_block,
    take_over,
)

# Of a product in the registers of a consumer.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@gluon.jit
def _multiply(a, b, product_MN):
    """a @ b^T into the registers of a product that is no longer needed: ptxas would take others, of which there are none."""
    product_MN = warpgroup_mma(a, b.permute((1, 0)), product_MN, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product_MN])


@gluon.jit
def _store_rows(out, consumer, total_MN, row, end, n, N):
    """Half by half, through one place of a consumer or two in turn."""
    room, out_desc, out_ptr = out
    PLACES: gl.constexpr = room.shape[0] // CONSUMERS
    left_MN, right_MN = halves(total_MN.to(out_desc.dtype))
    for i in gl.static_range(2):
        place = room.index(consumer * PLACES + i % PLACES)
        store_block(out_desc, out_ptr, place, left_MN if i == 0 else right_MN, row, end, n + i * HALF, N, PLACES - 1)


@gluon.jit
def _store_wide(out_ptr, total_MN, row, end, n, N, ADDS: gl.constexpr):
    """In fp32. What ADDS does not wait for the numbers in memory, each of which has but this one to add."""
    row_M = row + gl.arange(0, HALF, gl.SliceLayout(1, PRODUCT))
    n_N = n + gl.arange(0, BLOCK, gl.SliceLayout(0, PRODUCT))
    to_MN = out_ptr + row_M.to(gl.int64)[:, None] * N + n_N[None, :]
    mask_MN = (row_M < end)[:, None] & (n_N < N)[None, :]
    if ADDS:
        gl.atomic_add(to_MN, total_MN, mask=mask_MN, sem="relaxed", scope="gpu")
    else:
        gl.store(to_MN, total_MN, mask=mask_MN)


@gluon.jit
def _load_rows(ring, scales, operands, counter_ptr, offsets_ptr, E, K, N, R):
    a_ring, b_ring, full, empty, _ = ring
    a_scales, b_scales = scales
    a_desc, b_desc, a_scale_ptr, b_scale_ptr = operands
    BYTES: gl.constexpr = a_desc.block_type.nbytes + CONSUMERS * b_desc.block_type.nbytes
    tiles_N = gl.cdiv(N, CONSUMERS * BLOCK)
    number = gl.full([32], 0, gl.int32, ONE_WARP)
    stage, phase, begin, passed, tile = 0, 0, 0, 0, first_tile(counter_ptr)
    for e in range(E):
        end = gl.load(offsets_ptr + e)
        tiles = gl.cdiv(end - begin, BLOCK) * tiles_N
        while tile < tiles:
            row, column = begin + tile // tiles_N * BLOCK, tile % tiles_N * CONSUMERS
            hand_over(ring, stage, phase, (row, end, column))
            n = column * BLOCK
            # Whatever is read outside of the group or the matrix is not stored.
            a_scale_at = a_scale_ptr + gl.minimum(row + gl.arange(0, BLOCK, ONE_WARP), R - 1)
            for k in range(0, K, BLOCK):
                number = draw(counter_ptr, k + BLOCK >= K)
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
                stage, phase = next_stage(stage, phase)
            tile = drawn(number) - passed
        tile -= tiles
        passed += tiles
        begin = end
    end_tiles(ring, stage, phase, counter_ptr, tile, (0, 0, 0), 2)


@gluon.jit
def _sums(ring, scales, stage, phase, K, consumer, HALVES: gl.constexpr):
    """A tile's upper and lower half, of which HALVES are computed, and the stage and the phase after it."""
    a_ring, b_ring, full, empty, _ = ring
    a_scales, b_scales = scales
    upper_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    lower_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    product_MN = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
    for _step in range(K // BLOCK):
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
        stage, phase = next_stage(stage, phase)
    return upper_MN, lower_MN, stage, phase


@gluon.jit
def _multiply_rows(ring, scales, out, K, N, consumer):
    stage, phase = 0, 0
    row, end, column = take_over(ring, stage, phase)
    while row < end:
        n = (column + consumer) * BLOCK
        if row + HALF < end:
            upper_MN, lower_MN, stage, phase = _sums(ring, scales, stage, phase, K, consumer, 2)
        else:  # nothing of the lower half would be stored
            upper_MN, lower_MN, stage, phase = _sums(ring, scales, stage, phase, K, consumer, 1)
        _store_rows(out, consumer, upper_MN, row, end, n, N)
        _store_rows(out, consumer, lower_MN, row + HALF, end, n, N)
        row, end, column = take_over(ring, stage, phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "R"])
def _grouped_mm_blockwise_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, out_ptr, counter_ptr, offsets_ptr, E, K, N, R
):
    """out[r] = a[r] @ b[e]^T for the rows r of group e; 128 numbers of a row of a, and 128 x 128 of b, have a scale.

    Tiles of all groups are numbered, columns first.
    """
    ring = make_ring(a_desc, b_desc, 2)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], IN_ORDER)
    b_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, 1], IN_ORDER)
    scales = (a_scales, b_scales)
    room = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS, HALF, HALF], out_desc.layout)
    operands, out = (a_desc, b_desc, a_scale_ptr, b_scale_ptr), (room, out_desc, out_ptr)
    gl.warp_specialize(
        [
            (_multiply_rows, (ring, scales, out, K, N, 0)),
            (_multiply_rows, (ring, scales, out, K, N, 1)),
            (_load_rows, (ring, scales, operands, counter_ptr, offsets_ptr, E, K, N, R)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _load_columns(ring, scales, operands, counter_ptr, ends_ptr, E, N, K, BLOCKWISE: gl.constexpr):
    grad_ring, a_ring, full, empty, _ = ring
    grad_scales, a_scales = scales
    grad_desc, a_desc, grad_scale, a_scale = operands
    ELEMENTS: gl.constexpr = grad_desc.block_type.nbytes + CONSUMERS * a_desc.block_type.nbytes
    BYTES: gl.constexpr = ELEMENTS + (1 + CONSUMERS) * BLOCK * 4 if BLOCKWISE else ELEMENTS
    tiles_K = gl.cdiv(K, CONSUMERS * BLOCK)
    tiles = gl.cdiv(N, BLOCK) * tiles_K
    number = gl.full([32], 0, gl.int32, ONE_WARP)
    stage, phase, tile = 0, 0, first_tile(counter_ptr)
    while tile < E * tiles:
        e, block, column = tile // tiles, tile % tiles // tiles_K, tile % tiles_K * CONSUMERS
        n, k = block * BLOCK, column * BLOCK
        first = gl.load(ends_ptr + e - 1, mask=e > 0, other=0) // BLOCK
        end = gl.load(ends_ptr + e) // BLOCK
        hand_over(ring, stage, phase, (e, end - first, pair(block, column)))
        for step in range(first, end):
            number = draw(counter_ptr, step == end - 1)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(grad_desc, [n, step * BLOCK], bar, grad_ring.index(stage))
            if BLOCKWISE:
                tma.async_copy_global_to_shared(grad_scale, [step, n], bar, grad_scales.index(stage))
            for i in gl.static_range(CONSUMERS):
                at = stage * CONSUMERS + i
                tma.async_copy_global_to_shared(a_desc, [k + i * BLOCK, step * BLOCK], bar, a_ring.index(at))
                if BLOCKWISE:
                    tma.async_copy_global_to_shared(a_scale, [step, k + i * BLOCK], bar, a_scales.index(at))
            stage, phase = next_stage(stage, phase)
        tile = drawn(number)
    end_tiles(ring, stage, phase, counter_ptr, tile - E * tiles, (E, 0, 0), 1)


@gluon.jit
def _scale_of_step(scales, first, step, steps):
    """What the product of a step's 128 rows is multiplied by; both scales together must be within fp32."""
    grad_scale_ptr, a_scale_ptr = scales
    at = first + gl.minimum(step, steps - 1)
    return gl.load(grad_scale_ptr + at) * gl.load(a_scale_ptr + at)


@gluon.jit
def _multiply_columns(
    ring, scales, out, ends_ptr, E, N, K, consumer, BLOCKWISE: gl.constexpr, WIDE: gl.constexpr, ADDS: gl.constexpr
):
    grad_ring, a_ring, full, empty, _ = ring
    grad_scales, a_scales = scales
    stage, phase = 0, 0
    e, steps, numbers = take_over(ring, stage, phase)
    while e < E:
        upper_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        lower_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        product_NK = gl.zeros([HALF, BLOCK], gl.float32, PRODUCT)
        if not BLOCKWISE:
            first = gl.load(ends_ptr + e - 1, mask=e > 0, other=0) // BLOCK
            scale = _scale_of_step(scales, first, 0, steps)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            at = stage * CONSUMERS + consumer
            grad, a = grad_ring.index(stage), a_ring.index(at)
            if BLOCKWISE:
                a_scale, grad_scale = a_scales.index(at), grad_scales.index(stage).permute((1, 0))
                upper_scale, lower_scale = grad_scale.slice(0, HALF).load(PRODUCT), grad_scale.slice(HALF, HALF).load(PRODUCT)
                # Scales of a are read where they are used: a thread has 32 of them.
                product_NK = _multiply(grad.slice(0, HALF), a, product_NK)
                upper_NK += product_NK * upper_scale * a_scale.load(PRODUCT)
                product_NK = _multiply(grad.slice(HALF, HALF), a, product_NK)
                lower_NK += product_NK * lower_scale * a_scale.load(PRODUCT)
            else:
                product_NK = _multiply(grad.slice(0, HALF), a, product_NK)
                upper_NK += product_NK * scale
                product_NK = _multiply(grad.slice(HALF, HALF), a, product_NK)
                lower_NK += product_NK * scale
                scale = _scale_of_step(scales, first, step + 1, steps)  # ahead of where it is needed
            mbarrier.arrive(empty.index(stage))
            stage, phase = next_stage(stage, phase)
        block, column = halves_of(numbers)
        n, k = block * BLOCK, (column + consumer) * BLOCK
        if WIDE:
            _store_wide(out[0], upper_NK, e * N + n, e * N + N, k, K, ADDS)
            _store_wide(out[0], lower_NK, e * N + n + HALF, e * N + N, k, K, ADDS)
        else:
            _store_rows(out, consumer, upper_NK, e * N + n, e * N + N, k, K)
            _store_rows(out, consumer, lower_NK, e * N + n + HALF, e * N + N, k, K)
        e, steps, numbers = take_over(ring, stage, phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def _weight_grad_fp8_kernel(
    grad_desc, a_desc, grad_scale, a_scale, out_desc, out_ptr, counter_ptr, ends_ptr, E, N, K,
    BLOCKWISE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """out[e] = grad[:, columns of e] @ a[:, columns of e]^T, [N, K]; without a descriptor of it in fp32, or added to it.

    Blockwise, 128 numbers of a row of either have a scale, given by a descriptor; else 128 columns have one. Either way products
    of 128 columns are added up in fp32. Groups end at multiples of 128 and are not empty.
    """
    ring = make_ring(grad_desc, a_desc, 1)
    if out_desc is None:
        out = (out_ptr,)
    else:
        PLACES: gl.constexpr = CONSUMERS if BLOCKWISE else 2 * CONSUMERS
        room = gl.allocate_shared_memory(out_desc.dtype, [PLACES, HALF, HALF], out_desc.layout)
        out = (room, out_desc, out_ptr)
    if BLOCKWISE:
        grad_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], grad_scale.layout)
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, 1, BLOCK], a_scale.layout)
        scales = (grad_scales, a_scales)
    else:
        scales = (grad_scale, a_scale)
    operands = (grad_desc, a_desc, grad_scale, a_scale)
    gl.warp_specialize(
        [
            (_multiply_columns, (ring, scales, out, ends_ptr, E, N, K, 0, BLOCKWISE, out_desc is None, ADDS)),
            (_multiply_columns, (ring, scales, out, ends_ptr, E, N, K, 1, BLOCKWISE, out_desc is None, ADDS)),
            (_load_columns, (ring, scales, operands, counter_ptr, ends_ptr, E, N, K, BLOCKWISE)),
        ],
        [4, 1],
        [232, 40],
    )
