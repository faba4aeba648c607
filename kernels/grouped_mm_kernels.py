"""Grouped products whose sums stay in the tensor cores' registers, in Gluon, for Hopper: bf16, and FP8 with a scale a row.

See :mod:`kernels.ring_kernels`. Consumers have 64 rows of a tile each, which reads less shared memory than columns of their own
would, and share the right operand's 256 columns. A consumer keeps a finished tile in bf16, two numbers a register, and stores it
when its next tile's first product is under way: tensor cores wait for no store.
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

from kernels.ring_kernels import (
    BLOCK,
    CONSUMERS,
    HALF,
    ONE_WARP,
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
    rows_layout,
    store_block,
    take_over,
)


@gluon.constexpr_function
def sums_layout(columns, dtype):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.jit
def _zeros(LEFT_ROWS: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    return gl.zeros([LEFT_ROWS, COLUMNS], gl.float32, sums_layout(COLUMNS, dtype))


@gluon.jit
def _operands(ring, stage, consumer, TURNED: gl.constexpr):
    """Left [rows, depth] and right [depth, columns] of a stage; TURNED says of each whether its depth lies first in memory."""
    right, left = ring[0].index(stage), ring[1].index(stage * CONSUMERS + consumer)
    if len(right.shape) == 3:
        right = right.reshape([right.shape[1], right.shape[2]])
    return left.permute((1, 0)) if TURNED[0] else left, right if TURNED[1] else right.permute((1, 0))


@gluon.jit
def _begin(ring, stage, consumer, total_MN, TURNED: gl.constexpr):
    """Has the first product of a tile computed, whose stage is full."""
    left, right = _operands(ring, stage, consumer, TURNED)
    total_MN = warpgroup_mma(left, right, total_MN, use_acc=False, is_async=True)
    return warpgroup_mma_wait(1, deps=[total_MN])


@gluon.jit
def _finish(ring, stage, phase, steps, consumer, total_MN, TURNED: gl.constexpr):
    """Adds the other steps, each begun before the one ahead of it is done. The sums, and the stage and the phase after them."""
    _, _, full, empty, _ = ring
    last = stage
    stage, phase = next_stage(stage, phase)
    for _step in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        left, right = _operands(ring, stage, consumer, TURNED)
        total_MN = warpgroup_mma(left, right, total_MN, is_async=True)
        total_MN = warpgroup_mma_wait(1, deps=[total_MN])
        mbarrier.arrive(empty.index(last))
        last = stage
        stage, phase = next_stage(stage, phase)
    total_MN = warpgroup_mma_wait(0, deps=[total_MN])
    mbarrier.arrive(empty.index(last))
    return total_MN, stage, phase


@gluon.jit
def _skip(ring, stage, phase, steps):
    _, _, full, empty, _ = ring
    for _step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase)
    return stage, phase


@gluon.jit
def _pack(total_MN):
    """To bf16, two columns a number. As numbers of 16 bits they would take twice the registers while they wait."""
    even_MN, odd_MN = gl.split(gl.reshape(total_MN, (total_MN.shape[0], total_MN.shape[1] // 2, 2)))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even_MN, odd_MN], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _store(out, consumer, packed_MN, row, end, n, N):
    """Stores a packed tile in blocks of 64 columns, whole ones through two places in turn; row, end and n of none are 0."""
    room, out_desc, out_ptr = out
    WIDTH: gl.constexpr = HALF // 2
    if row < end:
        for i in gl.static_range(2):
            quarters = halves(halves(packed_MN)[i])
            for j in gl.static_range(2):
                place = room.index(consumer * 2 + j)
                store_block(out_desc, out_ptr, place, quarters[j], row, end, n // 2 + (2 * i + j) * WIDTH, N // 2, 1)


@gluon.jit
def _load_rows(ring, operands, counter_ptr, offsets_ptr, E, K, N, TURNED: gl.constexpr):
    b_ring, a_ring, full, empty, _ = ring
    b_desc, a_desc = operands
    BYTES: gl.constexpr = b_desc.block_type.nbytes + CONSUMERS * a_desc.block_type.nbytes
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    DEPTH: gl.constexpr = a_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = b_desc.block_type.shape[2 if TURNED[1] else 1]
    tiles_N = gl.cdiv(N, COLUMNS)
    number = gl.full([32], 0, gl.int32, ONE_WARP)
    stage, phase, begin, passed, tile = 0, 0, 0, 0, first_tile(counter_ptr)
    for e in range(E):
        end = gl.load(offsets_ptr + e)
        tiles = gl.cdiv(end - begin, BLOCK) * tiles_N
        while tile < tiles:
            # Whatever is read outside of the group or the matrix is not stored.
            row, n = begin + tile // tiles_N * BLOCK, tile % tiles_N * COLUMNS
            hand_over(ring, stage, phase, (row, end, pair(e, tile % tiles_N)))
            for k in range(0, K, DEPTH):
                number = draw(counter_ptr, k + DEPTH >= K)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, BYTES)
                for i in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(a_desc, [row + i * ROWS, k], bar, a_ring.index(stage * CONSUMERS + i))
                if TURNED[1]:
                    tma.async_copy_global_to_shared(b_desc, [e, k, n], bar, b_ring.index(stage))
                else:
                    tma.async_copy_global_to_shared(b_desc, [e, n, k], bar, b_ring.index(stage))
                stage, phase = next_stage(stage, phase)
            tile = drawn(number) - passed
        tile -= tiles
        passed += tiles
        begin = end
    end_tiles(ring, stage, phase, counter_ptr, tile, (0, 0, 0), 1)


@gluon.jit
def _multiply_rows(ring, out, scales, K, N, consumer, TURNED: gl.constexpr):
    a_scale_ptr, b_scale_ptr = scales
    ROWS: gl.constexpr = ring[1].shape[1]
    DEPTH: gl.constexpr = ring[1].shape[2]
    COLUMNS: gl.constexpr = ring[0].shape[3 if TURNED[1] else 2]
    LAYOUT: gl.constexpr = sums_layout(COLUMNS, ring[1].dtype)
    steps = gl.cdiv(K, DEPTH)
    stage, phase = 0, 0
    packed_MN = _pack(_zeros(ROWS, COLUMNS, ring[1].dtype))
    last_row, last_end, last_n = 0, 0, 0
    first, end, numbers = take_over(ring, stage, phase)
    while first < end:
        row = first + consumer * ROWS
        if row < end:
            total_MN = _zeros(ROWS, COLUMNS, ring[1].dtype)
            total_MN = _begin(ring, stage, consumer, total_MN, TURNED)
            _store(out, consumer, packed_MN, last_row, last_end, last_n, N)
            e, column = halves_of(numbers)
            n = column * COLUMNS
            if a_scale_ptr is not None:
                row_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
                n_N = n + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
                a_scale_M = gl.load(a_scale_ptr + row_M, mask=row_M < end, other=0.0)
                b_scale_N = gl.load(b_scale_ptr + e * N + n_N, mask=n_N < N, other=0.0)
            total_MN, stage, phase = _finish(ring, stage, phase, steps, consumer, total_MN, TURNED)
            if a_scale_ptr is not None:
                total_MN = total_MN * a_scale_M[:, None] * b_scale_N[None, :]
            packed_MN = _pack(total_MN)
            last_row, last_end, last_n = row, end, n
        else:  # nothing of these rows would be stored
            stage, phase = _skip(ring, stage, phase, steps)
        first, end, numbers = take_over(ring, stage, phase)
    _store(out, consumer, packed_MN, last_row, last_end, last_n, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def _grouped_mm_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, out_ptr, counter_ptr, offsets_ptr, E, K, N,
    B_IS_ENK: gl.constexpr,
):  # fmt: skip
    """out[r] = a[r] @ b[e] for the rows r of group e, times the row's and the column's scale if there are any.

    Tiles of all groups are numbered, columns first. ``out`` is in pairs of bf16.
    """
    TURNED: gl.constexpr = (False, not B_IS_ENK)
    ring = make_ring(b_desc, a_desc, 1)
    room = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    operands, out, scales = (b_desc, a_desc), (room, out_desc, out_ptr), (a_scale_ptr, b_scale_ptr)
    gl.warp_specialize(
        [
            (_multiply_rows, (ring, out, scales, K, N, 0, TURNED)),
            (_multiply_rows, (ring, out, scales, K, N, 1, TURNED)),
            (_load_rows, (ring, operands, counter_ptr, offsets_ptr, E, K, N, TURNED)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _load_columns(ring, operands, counter_ptr, offsets_ptr, E, N, K):
    """The first step takes the 64 rows up to the end of a group, of which the others, from its beginning on, leave some."""
    a_ring, grad_ring, full, empty, _ = ring
    a_desc, grad_desc = operands
    BYTES: gl.constexpr = a_desc.block_type.nbytes + CONSUMERS * grad_desc.block_type.nbytes
    ROWS: gl.constexpr = grad_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = a_desc.block_type.shape[1]
    tiles_K = gl.cdiv(K, COLUMNS)
    tiles = gl.cdiv(N, BLOCK) * tiles_K
    number = gl.full([32], 0, gl.int32, ONE_WARP)
    stage, phase, tile = 0, 0, first_tile(counter_ptr)
    while tile < E * tiles:
        e, n, k = tile // tiles, tile % tiles // tiles_K, tile % tiles_K
        begin, end = gl.load(offsets_ptr + e - 1, mask=e > 0, other=0), gl.load(offsets_ptr + e)
        steps = _steps(end - begin)
        hand_over(ring, stage, phase, (e, end - begin, pair(n, k)))
        for step in range(steps):
            number = draw(counter_ptr, step == steps - 1)
            row = gl.where(step == 0, end, begin + step * HALF) - HALF
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            for i in gl.static_range(CONSUMERS):
                at = stage * CONSUMERS + i
                tma.async_copy_global_to_shared(grad_desc, [row, n * BLOCK + i * ROWS], bar, grad_ring.index(at))
            tma.async_copy_global_to_shared(a_desc, [row, k * COLUMNS], bar, a_ring.index(stage))
            stage, phase = next_stage(stage, phase)
        tile = drawn(number)
    end_tiles(ring, stage, phase, counter_ptr, tile - E * tiles, (E, 0, 0), 1)


@gluon.jit
def _steps(rows):
    """Of a group's rows: an empty one has one as well."""
    return gl.maximum(gl.cdiv(rows, HALF), 1)


@gluon.jit
def _blank(block, rows):
    """Zeros in the first rows of a block in shared memory, of which some may be another group's, NaN maybe."""
    ROWS: gl.constexpr = rows_layout(block.dtype)
    x_RC = block.load(ROWS)
    keep_R = gl.arange(0, block.shape[0], gl.SliceLayout(1, ROWS)) >= rows
    block.store(gl.where(keep_R[:, None], x_RC, gl.zeros_like(x_RC)))


@gluon.jit
def _multiply_columns(ring, out, E, N, K, consumer):
    TURNED: gl.constexpr = (True, True)
    ROWS: gl.constexpr = ring[1].shape[2]
    COLUMNS: gl.constexpr = ring[0].shape[2]
    stage, phase = 0, 0
    packed_NK = _pack(_zeros(ROWS, COLUMNS, ring[1].dtype))
    last_row, last_end, last_k = 0, 0, 0
    e, rows, numbers = take_over(ring, stage, phase)
    while e < E:
        block, column = halves_of(numbers)
        n = block * BLOCK + consumer * ROWS
        steps = _steps(rows)
        if n < N:
            # Rows that the first step is to take; before them it has rows of the steps after it, or of another group.
            first = rows - (steps - 1) * HALF
            if first < HALF:
                _blank(ring[1].index(stage * CONSUMERS + consumer), HALF - first)
                if steps == 1:
                    # The other consumer writes the same zeros to the block that they share. Of longer groups it holds rows of
                    # their own there, which meet the zeros above.
                    _blank(ring[0].index(stage), HALF - first)
                fence_async_shared()
            total_NK = _zeros(ROWS, COLUMNS, ring[1].dtype)
            total_NK = _begin(ring, stage, consumer, total_NK, TURNED)
            _store(out, consumer, packed_NK, last_row, last_end, last_k, K)
            total_NK, stage, phase = _finish(ring, stage, phase, steps, consumer, total_NK, TURNED)
            packed_NK = _pack(total_NK)
            last_row, last_end, last_k = e * N + n, e * N + N, column * COLUMNS
        else:
            stage, phase = _skip(ring, stage, phase, steps)
        e, rows, numbers = take_over(ring, stage, phase)
    _store(out, consumer, packed_NK, last_row, last_end, last_k, K)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def _weight_grad_kernel(grad_desc, a_desc, out_desc, out_ptr, counter_ptr, offsets_ptr, E, N, K):
    """out[e] = grad[rows of e]^T @ a[rows of e], [N, K] in pairs of bf16, zero for an empty group."""
    ring = make_ring(a_desc, grad_desc, 1)
    room = gl.allocate_shared_memory(out_desc.dtype, [2 * CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    operands, out = (a_desc, grad_desc), (room, out_desc, out_ptr)
    gl.warp_specialize(
        [
            (_multiply_columns, (ring, out, E, N, K, 0)),
            (_multiply_columns, (ring, out, E, N, K, 1)),
            (_load_columns, (ring, operands, counter_ptr, offsets_ptr, E, N, K)),
        ],
        [4, 1],
        [232, 40],
    )
