"""Triton kernels of :mod:`kernels.dispatch`: two transfers between ranks, each in one launch.

Every second program writes into the memory of the other ranks, the others read what these write; see :mod:`kernels.peers` for
the rules. Tiles of tokens go round the pairs of a sender and a receiver.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from kernels import peers

STEPS = tl.constexpr(peers.STEPS)
SENT, READ = tl.constexpr(peers.SENT), tl.constexpr(peers.READ)
SIGNALS, TOKENS, EXPERTS, WEIGHTS = (tl.constexpr(field) for field in range(len(peers.Memory._fields)))


@triton.jit
def _field(table_ptr, field: tl.constexpr, peer, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Where a field starts on a peer."""
    start_ptr = tl.load(table_ptr + field * WORLD + peer).to(tl.pointer_type(dtype))
    return tl.multiple_of(start_ptr, 16)


@triton.jit
def _pair():
    """Number of senders, and which of them this program is or receives from."""
    pairs = tl.num_programs(0) // 2
    return pairs, tl.program_id(0) // 2


@triton.jit
def _tokens(tile, TILE: tl.constexpr):
    pairs, pair = _pair()
    return (tile * pairs + pair) * TILE + tl.arange(0, TILE).to(tl.int64)


@triton.jit
def _signal(table_ptr, kind: tl.constexpr, count, rank, WORLD: tl.constexpr, WORLD_P: tl.constexpr):
    """Tells this program's counterparts that it has come to ``count``; they then see all that the program has written."""
    pairs, pair = _pair()
    peer_W = tl.arange(0, WORLD_P)
    here_W = peer_W < WORLD
    first_W = tl.load(table_ptr + SIGNALS * WORLD + peer_W, mask=here_W, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    place = (rank * 2 + kind) * pairs + pair
    tl.atomic_xchg(first_W + place, tl.zeros([WORLD_P], tl.int64) + count, mask=here_W, sem="release", scope="sys")


@triton.jit
def _wait(
    table_ptr, state_ptr, failure, kind: tl.constexpr, count, rank, limit, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    """Waits until all counterparts have come to ``count``, at most ``limit`` nanoseconds (polls where there is no clock).

    After one failure nobody is waited for again.
    """
    pairs, pair = _pair()
    peer_W = tl.arange(0, WORLD_P)
    here_W = peer_W < WORLD
    place_W = _field(table_ptr, SIGNALS, rank, tl.int64, WORLD) + (peer_W * 2 + kind) * pairs + pair
    nothing_W = tl.zeros([WORLD_P], tl.int64)
    missing = tl.zeros([], tl.int32)
    elapsed = tl.zeros([], tl.int64)
    start = elapsed
    if CLOCK:
        start += globaltimer()
    failed_ptr = state_ptr + 2 * pairs
    while (missing < WORLD) & (elapsed <= limit):
        count_W = tl.atomic_add(place_W, nothing_W, mask=here_W, sem="acquire", scope="sys")
        missing = tl.min(tl.where(here_W & (count_W < count), peer_W, WORLD), axis=0)
        if missing < WORLD:
            if CLOCK:
                elapsed = globaltimer() - start
            else:
                elapsed += 1
            elapsed = tl.where(tl.load(failed_ptr, volatile=True) == 0, elapsed, limit + 1)
    if missing < WORLD:
        tl.store(failed_ptr, missing.to(tl.int64) + 1)
        tl.store(failure.to(tl.pointer_type(tl.int64)), missing.to(tl.int64) + 1)
    tl.debug_barrier()


@triton.jit
def _on(expert_TK, peer, num_local, etp):
    """Which experts lie on a peer."""
    local_TK = expert_TK - (peer // etp * num_local).to(tl.int32)
    return (local_TK >= 0) & (local_TK < num_local)


@triton.jit
def _any(mask_TK):
    return tl.max(mask_TK.to(tl.int32), axis=1) > 0


@triton.jit
def _send_tokens(
    x_ptr, experts_ptr, weights_ptr, table_ptr, t_T, T, D, stride_t, max_tokens, rank, num_local, etp,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes tokens to the other ranks that hold one of their experts and, with META, experts and weights to all others."""
    in_T, fits_T, k_K = t_T < T, t_T < max_tokens, tl.arange(0, K_P)
    pair_TK = t_T[:, None] * K + k_K[None, :]
    mask_TK = in_T[:, None] & (k_K < K)[None, :]
    expert_TK = tl.load(experts_ptr + pair_TK, mask=mask_TK, other=-1).to(tl.int32)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        in_D = d_D < D
        value_TD = tl.load(x_ptr + t_T[:, None] * stride_t + d_D[None, :], mask=in_T[:, None] & in_D[None, :])
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            there_T = _any(_on(expert_TK, peer, num_local, etp))
            tokens_ptr = _field(table_ptr, TOKENS, peer, x_ptr.dtype.element_ty, WORLD) + rank * max_tokens * D
            tl.store(tokens_ptr + t_T[:, None] * D + d_D[None, :], value_TD, mask=there_T[:, None] & in_D[None, :])
    if META:
        weight_TK = tl.load(weights_ptr + pair_TK, mask=mask_TK, other=0.0)
        place_TK = rank * max_tokens * K + pair_TK
        mask_TK = fits_T[:, None] & (k_K < K)[None, :]
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            tl.store(_field(table_ptr, EXPERTS, peer, tl.int32, WORLD) + place_TK, expert_TK, mask=mask_TK)
            peer_ptr = _field(table_ptr, WEIGHTS, peer, weights_ptr.dtype.element_ty, WORLD)
            tl.store(peer_ptr + place_TK, weight_TK, mask=mask_TK)


@triton.jit
def _deliver(
    tokens_ptr, experts_ptr, weights_ptr, row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, t_T,
    source, T, D, stride_t, max_tokens, first_expert, num_local,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies those tokens of a source that have an expert here: with META each to its slot, else to the rows of its choices."""
    fits_T, k_K = t_T < max_tokens, tl.arange(0, K_P)
    slot_T = source * max_tokens + t_T
    slot_TK = slot_T[:, None] * K + k_K[None, :]
    mask_TK = fits_T[:, None] & (k_K < K)[None, :]
    if META:
        pair_TK = t_T[:, None] * K + k_K[None, :]
        in_TK = mask_TK & (t_T < T)[:, None]
        local_TK = tl.load(experts_ptr + pair_TK, mask=in_TK, other=-1).to(tl.int32) - first_expert
        here_TK = (local_TK >= 0) & (local_TK < num_local) & in_TK
        tl.store(key_ptr + slot_TK, tl.where(here_TK, local_TK, num_local), mask=mask_TK)
        tl.store(slot_weights_ptr + slot_TK, tl.load(weights_ptr + pair_TK, mask=in_TK), mask=in_TK)
    else:
        here_TK = tl.load(row_ptr + slot_TK, mask=mask_TK, other=-1) >= 0
    here_T = _any(here_TK)
    if META:
        tl.store(slot_ptr + slot_T, tl.where(here_T, slot_T, -1).to(tl.int32), mask=fits_T)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        in_D = d_D < D
        mask_TD = here_T[:, None] & in_D[None, :]
        value_TD = tl.load(tokens_ptr + t_T[:, None] * stride_t + d_D[None, :], mask=mask_TD)
        if META:
            tl.store(rows_ptr + slot_T[:, None] * D + d_D[None, :], value_TD, mask=mask_TD)
        else:
            for k in tl.static_range(K):
                row_T = tl.load(row_ptr + slot_T * K + k, mask=fits_T, other=-1).to(tl.int64)
                mask_TD = (row_T >= 0)[:, None] & in_D[None, :]
                tl.store(rows_ptr + row_T[:, None] * D + d_D[None, :], value_TD, mask=mask_TD)


# Compiled once for all ranks and loads.
@triton.jit(do_not_specialize=["T", "max_tokens", "rank", "num_local", "steps", "tiles", "failure", "limit"])
def push_tokens_kernel(
    x_ptr, experts_ptr, weights_ptr, row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, state_ptr, table_ptr, failure,
    T, D, stride_t, max_tokens, rank, num_local, etp, steps, tiles, limit,
    META: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    program, rank = tl.program_id(0), rank.to(tl.int64)
    transfer = tl.load(state_ptr + program)
    if program % 2 == 0:
        _wait(table_ptr, state_ptr, failure, READ, transfer, rank, limit, WORLD, WORLD_P, CLOCK)
        for step in range(steps):
            for tile in range(step * tiles, (step + 1) * tiles):
                _send_tokens(
                    x_ptr, experts_ptr, weights_ptr, table_ptr, _tokens(tile, TILE), T, D, stride_t, max_tokens, rank,
                    num_local, etp, META, K, K_P, WORLD, BLOCK_D,
                )  # fmt: skip
            _signal(table_ptr, SENT, transfer * STEPS + step + 1, rank, WORLD, WORLD_P)
    else:
        first_expert = rank // etp * num_local
        for tile in range(steps * tiles):
            _deliver(
                x_ptr, experts_ptr, weights_ptr, row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr, _tokens(tile, TILE),
                rank, T, D, stride_t, max_tokens, first_expert, num_local, META, K, K_P, BLOCK_D,
            )  # fmt: skip
        sent_ptr = _field(table_ptr, TOKENS, rank, x_ptr.dtype.element_ty, WORLD)
        sent_experts_ptr = _field(table_ptr, EXPERTS, rank, tl.int32, WORLD)
        sent_weights_ptr = _field(table_ptr, WEIGHTS, rank, tl.float32, WORLD)
        if META:
            sent_weights_ptr = sent_weights_ptr.to(tl.pointer_type(weights_ptr.dtype.element_ty))
        for step in range(steps):
            _wait(table_ptr, state_ptr, failure, SENT, transfer * STEPS + step + 1, rank, limit, WORLD, WORLD_P, CLOCK)
            for turn in range(1, WORLD):
                peer = (rank + turn) % WORLD
                for tile in range(step * tiles, (step + 1) * tiles):
                    _deliver(
                        sent_ptr + peer * max_tokens * D, sent_experts_ptr + peer * max_tokens * K,
                        sent_weights_ptr + peer * max_tokens * K, row_ptr, rows_ptr, key_ptr, slot_weights_ptr, slot_ptr,
                        _tokens(tile, TILE), peer, max_tokens, D, D, max_tokens, first_expert, num_local, META, K, K_P, BLOCK_D,
                    )  # fmt: skip
        _signal(table_ptr, READ, transfer + 1, rank, WORLD, WORLD_P)
    tl.store(state_ptr + program, transfer + 1)


@triton.jit
def _sum_rows(
    rows_ptr, row_ptr, slot_T, mask_T, d_D, D, CHOICES: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Sums in fp32, and which tokens have a row at all."""
    total_TD, here_T = tl.zeros([TILE, BLOCK_D], tl.float32), mask_T & False
    for k in tl.static_range(CHOICES):
        row_T = tl.load(row_ptr + slot_T * CHOICES + k, mask=mask_T, other=-1).to(tl.int64)
        mask_TD = (row_T >= 0)[:, None] & (d_D < D)[None, :]
        total_TD += tl.load(rows_ptr + row_T[:, None] * D + d_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        here_T |= row_T >= 0
    return total_TD, here_T


@triton.jit
def _send_sums(
    rows_ptr, row_ptr, slot_grads_ptr, table_ptr, t_T, target, D, max_tokens, rank,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes this rank's share of a target's tokens, and of the gradient of their weights, into the target's memory."""
    fits_T, k_K = t_T < max_tokens, tl.arange(0, K_P)
    slot_T = target * max_tokens + t_T
    tokens_ptr = _field(table_ptr, TOKENS, target, rows_ptr.dtype.element_ty, WORLD) + rank * max_tokens * D
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        total_TD, here_T = _sum_rows(rows_ptr, row_ptr, slot_T, fits_T, d_D, D, CHOICES, TILE, BLOCK_D)
        mask_TD = here_T[:, None] & (d_D < D)[None, :]
        tl.store(tokens_ptr + t_T[:, None] * D + d_D[None, :], total_TD.to(rows_ptr.dtype.element_ty), mask=mask_TD)
    if WITH_GRADS:
        mask_TK = fits_T[:, None] & (k_K < K)[None, :]
        grad_TK = tl.load(slot_grads_ptr + slot_T[:, None] * K + k_K[None, :], mask=mask_TK)
        grads_ptr = _field(table_ptr, WEIGHTS, target, slot_grads_ptr.dtype.element_ty, WORLD)
        tl.store(grads_ptr + (rank * max_tokens + t_T[:, None]) * K + k_K[None, :], grad_TK, mask=mask_TK)


@triton.jit
def _add_sums(
    rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, state_ptr, table_ptr, failure, t_T, count,
    T, D, max_tokens, rank, num_local, etp, limit,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    WORLD_P: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of this rank's tokens: its own from the rows, while the others' are still on their way."""
    in_T, k_K, own_T = t_T < T, tl.arange(0, K_P), rank * max_tokens + t_T
    pair_TK = t_T[:, None] * K + k_K[None, :]
    mask_TK = in_T[:, None] & (k_K < K)[None, :]
    expert_TK = tl.load(experts_ptr + pair_TK, mask=mask_TK, other=-1).to(tl.int32)
    tokens_ptr = _field(table_ptr, TOKENS, rank, rows_ptr.dtype.element_ty, WORLD)
    for first in range(0, D, BLOCK_D):
        d_D = first + tl.arange(0, BLOCK_D)
        total_TD, _ = _sum_rows(rows_ptr, row_ptr, own_T, in_T, d_D, D, CHOICES, TILE, BLOCK_D)
        if first == 0:
            _wait(table_ptr, state_ptr, failure, SENT, count, rank, limit, WORLD, WORLD_P, CLOCK)
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            there_T = _any(_on(expert_TK, peer, num_local, etp))
            place_TD = (peer * max_tokens + t_T[:, None]) * D + d_D[None, :]
            mask_TD = there_T[:, None] & (d_D < D)[None, :]
            total_TD += tl.load(tokens_ptr + place_TD, mask=mask_TD, other=0.0).to(tl.float32)
        mask_TD = in_T[:, None] & (d_D < D)[None, :]
        tl.store(y_ptr + t_T[:, None] * D + d_D[None, :], total_TD.to(y_ptr.dtype.element_ty), mask=mask_TD)
    if WITH_GRADS:
        sent_ptr = _field(table_ptr, WEIGHTS, rank, slot_grads_ptr.dtype.element_ty, WORLD)
        own_TK = own_T[:, None] * K + k_K[None, :]
        grad_TK = tl.load(slot_grads_ptr + own_TK, mask=_on(expert_TK, rank, num_local, etp), other=0.0)
        for turn in range(1, WORLD):
            peer = (rank + turn) % WORLD
            grad_TK += tl.load(sent_ptr + peer * max_tokens * K + pair_TK, mask=_on(expert_TK, peer, num_local, etp), other=0.0)
        tl.store(grads_ptr + pair_TK, grad_TK, mask=mask_TK)


@triton.jit(do_not_specialize=["T", "max_tokens", "rank", "num_local", "steps", "tiles", "failure", "limit"])
def push_sums_kernel(
    rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, state_ptr, table_ptr, failure,
    T, D, max_tokens, rank, num_local, etp, steps, tiles, limit,
    WITH_GRADS: tl.constexpr, CHOICES: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, WORLD: tl.constexpr,
    WORLD_P: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    program, rank = tl.program_id(0), rank.to(tl.int64)
    transfer = tl.load(state_ptr + program)
    if program % 2 == 0:
        _wait(table_ptr, state_ptr, failure, READ, transfer, rank, limit, WORLD, WORLD_P, CLOCK)
        for step in range(steps):
            for turn in range(1, WORLD):
                for tile in range(step * tiles, (step + 1) * tiles):
                    _send_sums(
                        rows_ptr, row_ptr, slot_grads_ptr, table_ptr, _tokens(tile, TILE), (rank + turn) % WORLD, D,
                        max_tokens, rank, WITH_GRADS, CHOICES, K, K_P, WORLD, TILE, BLOCK_D,
                    )  # fmt: skip
            _signal(table_ptr, SENT, transfer * STEPS + step + 1, rank, WORLD, WORLD_P)
    else:
        for tile in range(steps * tiles):
            _add_sums(
                rows_ptr, row_ptr, slot_grads_ptr, experts_ptr, y_ptr, grads_ptr, state_ptr, table_ptr, failure,
                _tokens(tile, TILE), transfer * STEPS + tile // tiles + 1, T, D, max_tokens, rank, num_local, etp, limit,
                WITH_GRADS, CHOICES, K, K_P, WORLD, WORLD_P, TILE, BLOCK_D, CLOCK,
            )  # fmt: skip
        _signal(table_ptr, READ, transfer + 1, rank, WORLD, WORLD_P)
    tl.store(state_ptr + program, transfer + 1)
