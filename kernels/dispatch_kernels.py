"""Triton kernels of :mod:`kernels.dispatch`: two transfers between ranks, each in one launch.

Both cut the tokens of every rank into ``STEPS`` pieces for each program and run one piece ahead: while a piece is on its way, the
program works on the one before. See :mod:`kernels.peers` for the rules of the shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from kernels import peers

STEPS = tl.constexpr(peers.STEPS)
PULL, PUSH = tl.constexpr(peers.PULL), tl.constexpr(peers.PUSH)
SIGNALS, STAGED, EXPERTS, WEIGHTS, SUMS, GRADS = (tl.constexpr(field) for field in range(len(peers.Memory._fields)))


@triton.jit
def _field(table_ptr, field: tl.constexpr, peer, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Where a field starts on a peer."""
    start_ptr = tl.load(table_ptr + field * WORLD + peer).to(tl.pointer_type(dtype))
    return tl.multiple_of(start_ptr, 16)


@triton.jit
def _signal(table_ptr, kind: tl.constexpr, count, rank, WORLD: tl.constexpr, WORLD_P: tl.constexpr):
    """Tells this program's counterparts that it has come to ``count``; they then see all that the program has written."""
    program, programs, peer_W = tl.program_id(0), tl.num_programs(0), tl.arange(0, WORLD_P)
    here_W = peer_W < WORLD
    first_W = tl.load(table_ptr + SIGNALS * WORLD + peer_W, mask=here_W, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    place = (kind * WORLD + rank) * programs + program
    tl.atomic_xchg(first_W + place, tl.zeros([WORLD_P], tl.int64) + count, mask=here_W, sem="release", scope="sys")


@triton.jit
def _wait(
    table_ptr, state_ptr, failure_ptr, kind: tl.constexpr, count, rank, limit, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    """Waits until all counterparts have come to ``count``, at most ``limit`` nanoseconds (polls where there is no clock)."""
    program, programs, peer_W = tl.program_id(0), tl.num_programs(0), tl.arange(0, WORLD_P)
    here_W = peer_W < WORLD
    signals_ptr = _field(table_ptr, SIGNALS, rank, tl.int64, WORLD)
    place_W = signals_ptr + (kind * WORLD + peer_W) * programs + program
    nothing_W = tl.zeros([WORLD_P], tl.int64)
    missing = tl.zeros([], tl.int32)
    elapsed = tl.zeros([], tl.int64)
    start = elapsed
    if CLOCK:
        start += globaltimer()
    while (missing < WORLD) & (elapsed <= limit):
        count_W = tl.atomic_add(place_W, nothing_W, mask=here_W, sem="acquire", scope="sys")
        missing = tl.min(tl.where(here_W & (count_W < count), peer_W, WORLD), axis=0)
        if CLOCK:
            elapsed = globaltimer() - start
        else:
            elapsed += 1
    if missing < WORLD:
        tl.store(state_ptr + 2 * programs, missing.to(tl.int64) + 1)
        tl.store(failure_ptr, missing.to(tl.int64) + 1)
    tl.debug_barrier()


@triton.jit
def _patience(state_ptr, limit):
    """After one failure nobody is waited for again."""
    return tl.where(tl.load(state_ptr + 2 * tl.num_programs(0)) == 0, limit, 0)


@triton.jit
def _stage(
    x_ptr, experts_ptr, weights_ptr, table_ptr, t_T, T, D, stride_t, max_tokens, rank,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Puts tokens into this rank's memory and, with META, their experts and weights into everybody's."""
    in_T, fits_T, k_K = t_T < T, t_T < max_tokens, tl.arange(0, K_P)
    staged_ptr = _field(table_ptr, STAGED, rank, x_ptr.dtype.element_ty, WORLD)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        mask_TD = in_T[:, None] & (d_D < D)[None, :]
        value_TD = tl.load(x_ptr + t_T[:, None] * stride_t + d_D[None, :], mask=mask_TD)
        tl.store(staged_ptr + t_T[:, None] * D + d_D[None, :], value_TD, mask=mask_TD)
    if META:
        pair_TK = t_T[:, None] * K + k_K[None, :]
        mask_TK = in_T[:, None] & (k_K < K)[None, :]
        expert_TK = tl.load(experts_ptr + pair_TK, mask=mask_TK, other=-1).to(tl.int32)
        weight_TK = tl.load(weights_ptr + pair_TK, mask=mask_TK, other=0.0)
        place_TK = rank * max_tokens * K + pair_TK
        mask_TK = fits_T[:, None] & (k_K < K)[None, :]
        for step in range(WORLD):
            peer = (rank + step) % WORLD
            tl.store(_field(table_ptr, EXPERTS, peer, tl.int32, WORLD) + place_TK, expert_TK, mask=mask_TK)
            peer_ptr = _field(table_ptr, WEIGHTS, peer, weights_ptr.dtype.element_ty, WORLD)
            tl.store(peer_ptr + place_TK, weight_TK, mask=mask_TK)


@triton.jit
def _fetch(
    row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, table_ptr, t_T, source, D, max_tokens, rank,
    first_expert, num_local,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies those tokens of a source that have an expert here: with META each to its slot, else to the rows of its choices."""
    fits_T, k_K = t_T < max_tokens, tl.arange(0, K_P)
    slot_T = source * max_tokens + t_T
    pair_TK = slot_T[:, None] * K + k_K[None, :]
    mask_TK = fits_T[:, None] & (k_K < K)[None, :]
    if META:
        local_TK = tl.load(_field(table_ptr, EXPERTS, rank, tl.int32, WORLD) + pair_TK, mask=mask_TK, other=-1)
        local_TK -= first_expert
        here_TK = (local_TK >= 0) & (local_TK < num_local) & mask_TK
        tl.store(key_ptr + pair_TK, tl.where(here_TK, local_TK, num_local), mask=mask_TK)
        weight_ptr = _field(table_ptr, WEIGHTS, rank, slot_weights_ptr.dtype.element_ty, WORLD)
        tl.store(slot_weights_ptr + pair_TK, tl.load(weight_ptr + pair_TK, mask=mask_TK), mask=mask_TK)
    else:
        here_TK = tl.load(row_ptr + pair_TK, mask=mask_TK, other=-1) >= 0
    here_T = tl.max(here_TK.to(tl.int32), axis=1) > 0
    if META:
        tl.store(slot_ptr + slot_T, tl.where(here_T, slot_T, -1).to(tl.int32), mask=fits_T)
    staged_ptr = _field(table_ptr, STAGED, source, rows_ptr.dtype.element_ty, WORLD)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        in_D = d_D < D
        value_TD = tl.load(staged_ptr + t_T[:, None] * D + d_D[None, :], mask=here_T[:, None] & in_D[None, :])
        if META:
            tl.store(rows_ptr + slot_T[:, None] * D + d_D[None, :], value_TD, mask=here_T[:, None] & in_D[None, :])
        else:
            for k in tl.static_range(K):
                row_T = tl.load(row_ptr + slot_T * K + k, mask=fits_T, other=-1).to(tl.int64)
                mask_TD = (row_T >= 0)[:, None] & in_D[None, :]
                tl.store(rows_ptr + row_T[:, None] * D + d_D[None, :], value_TD, mask=mask_TD)


# Compiled once for all ranks and loads.
@triton.jit(do_not_specialize=["T", "max_tokens", "rank", "first_expert", "num_local", "tiles", "failure", "limit"])
def pull_kernel(
    x_ptr, experts_ptr, weights_ptr, row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, state_ptr, table_ptr, failure,
    T, D, stride_t, max_tokens, rank, first_expert, num_local, tiles, limit,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    program, programs, i_T = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE).to(tl.int64)
    transfer = tl.load(state_ptr + PULL * programs + program)
    count, patience = transfer * STEPS, _patience(state_ptr, limit)
    failure_ptr = failure.to(tl.pointer_type(tl.int64))
    for step in range(STEPS + 1):
        if step < STEPS:
            for tile in range(tiles):
                t_T = ((step * programs + program) * tiles + tile) * TILE + i_T
                _stage(
                    x_ptr, experts_ptr, weights_ptr, table_ptr, t_T, T, D, stride_t, max_tokens, rank,
                    META, K, K_P, WORLD, BLOCK_D,
                )  # fmt: skip
            _signal(table_ptr, PULL, count + step + 1, rank, WORLD, WORLD_P)
        if step > 0:
            _wait(table_ptr, state_ptr, failure_ptr, PULL, count + step, rank, patience, WORLD, WORLD_P, CLOCK)
            for turn in range(WORLD):
                for tile in range(tiles):
                    t_T = (((step - 1) * programs + program) * tiles + tile) * TILE + i_T
                    _fetch(
                        row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, table_ptr, t_T,
                        (rank + turn) % WORLD, D, max_tokens, rank, first_expert, num_local, META, K, K_P, WORLD, BLOCK_D,
                    )  # fmt: skip
    tl.store(state_ptr + PULL * programs + program, transfer + 1)


@triton.jit
def _sum_rows(
    rows_ptr, row_ptr, slot_T, mask_T, d_D, D, CHOICES: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    total_TD = tl.zeros([TILE, BLOCK_D], tl.float32)
    for k in tl.static_range(CHOICES):
        row_T = tl.load(row_ptr + slot_T * CHOICES + k, mask=mask_T, other=-1).to(tl.int64)
        mask_TD = (row_T >= 0)[:, None] & (d_D < D)[None, :]
        total_TD += tl.load(rows_ptr + row_T[:, None] * D + d_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
    return total_TD


@triton.jit
def _send_sums(
    rows_ptr, row_ptr, slot_grads_ptr, table_ptr, t_T, target, D, max_tokens, rank,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes this rank's share of a target's tokens, and of the gradient of their weights, into the target's memory."""
    fits_T, k_K, j_J = t_T < max_tokens, tl.arange(0, K_P), tl.arange(0, K_P)
    slot_T = target * max_tokens + t_T
    mask_TJ = fits_T[:, None] & (j_J < CHOICES)[None, :]
    row_TJ = tl.load(row_ptr + slot_T[:, None] * CHOICES + j_J[None, :], mask=mask_TJ, other=-1)
    here_T = tl.max(row_TJ, axis=1) >= 0
    sums_ptr = _field(table_ptr, SUMS, target, rows_ptr.dtype.element_ty, WORLD) + rank * max_tokens * D
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        total_TD = _sum_rows(rows_ptr, row_ptr, slot_T, fits_T, d_D, D, CHOICES, TILE, BLOCK_D)
        mask_TD = here_T[:, None] & (d_D < D)[None, :]
        tl.store(sums_ptr + t_T[:, None] * D + d_D[None, :], total_TD.to(rows_ptr.dtype.element_ty), mask=mask_TD)
    if WITH_GRADS:
        mask_TK = here_T[:, None] & (k_K < K)[None, :]
        grad_TK = tl.load(slot_grads_ptr + slot_T[:, None] * K + k_K[None, :], mask=mask_TK)
        grads_ptr = _field(table_ptr, GRADS, target, slot_grads_ptr.dtype.element_ty, WORLD)
        place_TK = (rank * max_tokens + t_T[:, None]) * K + k_K[None, :]
        tl.store(grads_ptr + place_TK, grad_TK, mask=mask_TK)


@triton.jit
def _add_sums(
    rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, table_ptr, t_T,
    T, D, max_tokens, rank, num_local, etp,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of this rank's tokens; its own share comes straight from the rows."""
    in_T, k_K, own_T = t_T < T, tl.arange(0, K_P), rank * max_tokens + t_T
    pair_TK = t_T[:, None] * K + k_K[None, :]
    mask_TK = in_T[:, None] & (k_K < K)[None, :]
    # Which of the ep places holds each expert; none holds what is not routed, and none holds -1.
    holder_TK = tl.where(mask_TK, tl.load(experts_ptr + pair_TK, mask=mask_TK, other=0) // num_local, -1)
    sums_ptr = _field(table_ptr, SUMS, rank, rows_ptr.dtype.element_ty, WORLD)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        total_TD = _sum_rows(rows_ptr, row_ptr, own_T, in_T, d_D, D, CHOICES, TILE, BLOCK_D)
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            there_T = tl.max((holder_TK == peer // etp).to(tl.int32), axis=1) > 0
            place_TD = (peer * max_tokens + t_T[:, None]) * D + d_D[None, :]
            mask_TD = there_T[:, None] & (d_D < D)[None, :]
            total_TD += tl.load(sums_ptr + place_TD, mask=mask_TD, other=0.0).to(tl.float32)
        mask_TD = in_T[:, None] & (d_D < D)[None, :]
        tl.store(y_ptr + t_T[:, None] * D + d_D[None, :], total_TD.to(y_ptr.dtype.element_ty), mask=mask_TD)
    if WITH_GRADS:
        sent_ptr = _field(table_ptr, GRADS, rank, slot_grads_ptr.dtype.element_ty, WORLD)
        own_TK = own_T[:, None] * K + k_K[None, :]
        grad_TK = tl.load(slot_grads_ptr + own_TK, mask=holder_TK == rank // etp, other=0.0)
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            grad_TK += tl.load(sent_ptr + peer * max_tokens * K + pair_TK, mask=holder_TK == peer // etp, other=0.0)
        tl.store(grads_ptr + pair_TK, grad_TK, mask=mask_TK)


@triton.jit(do_not_specialize=["T", "max_tokens", "rank", "num_local", "tiles", "failure", "limit"])
def push_kernel(
    rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, state_ptr, table_ptr, failure,
    T, D, max_tokens, rank, num_local, etp, tiles, limit,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    WORLD_P: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    program, programs, i_T = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE).to(tl.int64)
    transfer = tl.load(state_ptr + PUSH * programs + program)
    count, patience = transfer * STEPS, _patience(state_ptr, limit)
    failure_ptr = failure.to(tl.pointer_type(tl.int64))
    for step in range(STEPS + 1):
        if step < STEPS:
            for turn in range(1, WORLD):
                for tile in range(tiles):
                    t_T = ((step * programs + program) * tiles + tile) * TILE + i_T
                    _send_sums(
                        rows_ptr, row_ptr, slot_grads_ptr, table_ptr, t_T, (rank + turn) % WORLD, D, max_tokens, rank,
                        WITH_GRADS, CHOICES, K, K_P, WORLD, TILE, BLOCK_D,
                    )  # fmt: skip
            _signal(table_ptr, PUSH, count + step + 1, rank, WORLD, WORLD_P)
        if step > 0:
            _wait(table_ptr, state_ptr, failure_ptr, PUSH, count + step, rank, patience, WORLD, WORLD_P, CLOCK)
            for tile in range(tiles):
                t_T = (((step - 1) * programs + program) * tiles + tile) * TILE + i_T
                _add_sums(
                    rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, table_ptr, t_T,
                    T, D, max_tokens, rank, num_local, etp, WITH_GRADS, CHOICES, K, K_P, WORLD, TILE, BLOCK_D,
                )  # fmt: skip
    tl.store(state_ptr + PUSH * programs + program, transfer + 1)
