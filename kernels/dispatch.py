"""Tokens to the ranks of their experts and back, through memory that the ranks share, without a host sync.

``push_tokens`` brings each token once to every rank that holds one of its experts. ``push_sums`` is its adjoint: it adds up the
rows of one token on each rank, sends that sum to the token's rank, and adds the ranks' sums there in fp32. ``push_rows`` is the
adjoint of ``push_sums``: a token goes to the rows of its choices. All three are collective: every rank of an exchange
calls the same ones in the same order, even without tokens. No shape depends on data.

Token t of rank s has place (slot) ``s * max_tokens + t`` on every rank, so nobody has to count or to agree on anything; places of
tokens without an expert on a rank stay unwritten and unread there.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.dispatch_kernels import push_sums_kernel, push_tokens_kernel
from kernels.op import op
from kernels.peers import READ, SENT, STEPS, Exchange, Memory, Peers, TransferShape, exchange

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]

# Tokens that a program works on at a time, the same in all transfers: they decide which pair of programs has which tokens.
TILE = 2
WARPS = 4
PROGRAMS_OF_SM = 5
"""Programs that are on one multiprocessor together."""


def _new_slots(x_TD: Tensor, weights_TK: Tensor, slots: int) -> Outputs:
    K = weights_TK.shape[1]
    key_NK, slot_N = (x_TD.new_empty(size, dtype=torch.int32) for size in ((slots, K), (slots,)))
    return x_TD.new_empty(slots, x_TD.shape[1]), weights_TK.new_empty(slots, K), key_NK, slot_N


def _wait_reference(group: Exchange, peers: Peers, kind: int, count: int) -> None:
    deadline = time.monotonic() + group.timeout
    while (missing := (peers.memories[group.rank].signals[:, kind, 0] < count).nonzero()).numel():
        if time.monotonic() > deadline:
            peers.failure.fill_(int(missing[0]) + 1)
            group.check(peers)
        time.sleep(0)


def _signal_reference(group: Exchange, peers: Peers, kind: int, count: int) -> None:
    for memory in peers.memories:
        memory.signals[group.rank, kind] = count


def _write_reference(group: Exchange, peers: Peers, write: Callable[[int, Memory], None]) -> Memory:
    """Calls ``write`` with each rank and the part of its memory that is this rank's; returns what all wrote to this rank."""
    transfer = int(peers.state[0])
    _wait_reference(group, peers, READ, transfer)
    for target, memory in enumerate(peers.memories):
        write(target, Memory(*(field[group.rank] for field in memory)))
    _signal_reference(group, peers, SENT, transfer + 1)
    _wait_reference(group, peers, SENT, transfer + 1)
    return peers.memories[group.rank]


def _end_reference(group: Exchange, peers: Peers) -> None:
    """After the reading."""
    peers.state[0] += 1
    _signal_reference(group, peers, READ, int(peers.state[0]))


def push_tokens_reference(
    group: Exchange, peers: Peers, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_local: int, etp: int
) -> Outputs:
    T = len(x_TD)

    def write(target: int, memory: Memory) -> None:
        memory.tokens[:T], memory.weights[:T], memory.experts[:T], memory.experts[T:] = x_TD, weights_TK, experts_TK, -1

    tokens_ND, slot_weights_NK, key_NK, slot_N = _new_slots(x_TD, weights_TK, group.slots)
    received = _write_reference(group, peers, write)
    local_NK = received.experts.flatten(0, 1) - group.rank // etp * num_local
    key_NK.copy_(torch.where((local_NK >= 0) & (local_NK < num_local), local_NK, num_local))
    slot_weights_NK.copy_(received.weights.flatten(0, 1))
    here_N = (key_NK < num_local).any(1)
    slot_N.copy_(torch.where(here_N, torch.arange(group.slots), -1))
    tokens_ND[here_N] = received.tokens.flatten(0, 1)[here_N]
    _end_reference(group, peers)
    return tokens_ND, slot_weights_NK, key_NK, slot_N


def push_rows_reference(
    group: Exchange, peers: Peers, x_TD: Tensor, row_NK: Tensor, experts_TK: Tensor, num_rows: int, num_local: int, etp: int
) -> Tensor:
    def write(target: int, memory: Memory) -> None:
        there_T = (experts_TK // num_local == target // etp).any(1)
        memory.tokens[: len(x_TD)][there_T] = x_TD[there_T]

    rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    slot_P, k_P = (row_NK >= 0).nonzero(as_tuple=True)
    rows_RD[row_NK[slot_P, k_P].long()] = _write_reference(group, peers, write).tokens.flatten(0, 1)[slot_P]
    _end_reference(group, peers)
    return rows_RD


def push_sums_reference(
    group: Exchange, peers: Peers, rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor,
    num_local: int, etp: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, K = experts_TK.shape
    wide = torch.promote_types(rows_RD.dtype, torch.float32)

    def write(target: int, memory: Memory) -> None:
        slots = slice(target * group.max_tokens, (target + 1) * group.max_tokens)
        picked_TJD = rows_RD[row_NJ[slots].clamp(min=0).long()].to(wide)
        here_TJ1 = (row_NJ[slots] >= 0).unsqueeze(-1)
        memory.tokens[:] = torch.where(here_TJ1, picked_TJD, 0).sum(1).to(rows_RD.dtype)
        if slot_grads_NK is not None:
            memory.weights[:] = slot_grads_NK[slots]

    received = _write_reference(group, peers, write)
    holder_TK = experts_TK // num_local
    y_TD, grads_TK = rows_RD.new_zeros(T, rows_RD.shape[1], dtype=wide), torch.zeros(T, K, dtype=received.weights.dtype)
    for peer in range(group.world):
        there_TK = holder_TK == peer // etp
        y_TD += torch.where(there_TK.any(1, keepdim=True), received.tokens[peer, :T].to(wide), 0)
        grads_TK += torch.where(there_TK, received.weights[peer, :T], 0)
    _end_reference(group, peers)
    return y_TD.to(rows_RD.dtype), grads_TK if slot_grads_NK is not None else grads_TK.new_empty(0, K)


def _launch_options(group: Exchange, peers: Peers, D: int, K: int, num_local: int, etp: int) -> dict[str, Any]:
    """The arguments that the kernels share."""
    tiles = triton.cdiv(group.max_tokens, group.pairs * TILE)
    tiles_of_step = triton.cdiv(tiles, STEPS)
    return {
        "state_ptr": peers.state,
        "table_ptr": peers.table,
        "failure": peers.failure.data_ptr(),
        "D": D,
        "max_tokens": group.max_tokens,
        "rank": group.rank,
        "num_local": num_local,
        "etp": etp,
        "steps": triton.cdiv(tiles, tiles_of_step),
        "tiles": tiles_of_step,
        "limit": int(group.timeout * 1e9),
        "K": K,
        "K_P": triton.next_power_of_2(K),
        "WORLD": group.world,
        "WORLD_P": triton.next_power_of_2(group.world),
        "TILE": TILE,
        "BLOCK_D": min(triton.next_power_of_2(D), 2048),
        "CLOCK": peers.state.is_cuda,
        "num_warps": WARPS,
    }


def _launch_push_tokens(
    group: Exchange, peers: Peers, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, num_local: int, etp: int
) -> Outputs:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, K), D = experts_TK.shape, x_TD.shape[1]
    outputs = tokens_ND, slot_weights_NK, key_NK, slot_N = _new_slots(x_TD, weights_TK, group.slots)
    push_tokens_kernel[(2 * group.pairs,)](
        x_TD, experts_TK.contiguous(), weights_TK.contiguous(), None, tokens_ND, key_NK, slot_weights_NK, slot_N, T=T,
        stride_t=x_TD.stride(0), META=True, **_launch_options(group, peers, D, K, num_local, etp),
    )  # fmt: skip
    return outputs


def _launch_push_rows(
    group: Exchange, peers: Peers, x_TD: Tensor, row_NK: Tensor, experts_TK: Tensor, num_rows: int, num_local: int, etp: int
) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, D), K = x_TD.shape, row_NK.shape[1]
    rows_RD = x_TD.new_empty(num_rows, D)
    push_tokens_kernel[(2 * group.pairs,)](
        x_TD, experts_TK.contiguous(), None, row_NK.contiguous(), rows_RD, None, None, None, T=T,
        stride_t=x_TD.stride(0), META=False, **_launch_options(group, peers, D, K, num_local, etp),
    )  # fmt: skip
    return rows_RD


def _launch_push_sums(
    group: Exchange, peers: Peers, rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor,
    num_local: int, etp: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, K), D = experts_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    grads_TK = peers.memories[0].weights.new_empty(T if slot_grads_NK is not None else 0, K)
    push_sums_kernel[(2 * group.pairs,)](
        rows_RD.contiguous(), row_NJ.contiguous(), None if slot_grads_NK is None else slot_grads_NK.contiguous(),
        experts_TK.contiguous(), y_TD, grads_TK, T=T, WITH_GRADS=slot_grads_NK is not None, CHOICES=row_NJ.shape[1],
        **_launch_options(group, peers, D, K, num_local, etp),
    )  # fmt: skip
    return y_TD, grads_TK


def _peers(group: Exchange, x: Tensor, K: int) -> Peers:
    return group.peers(TransferShape(x.shape[1], K, x.dtype), x.device)


@op("push_tokens")
def push_tokens(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Brings every token that has an expert on this rank.

    Args:
        x_TD: [T, D] this rank's tokens, T at most the exchange's ``max_tokens``; ranks may differ in T.
        experts_TK: [T, K] integers; an index that no rank holds is not routed.
        weights_TK: [T, K] in the tokens' type, or fp32 where that is narrower.
        name: of the exchange.
        num_local, etp: expert e lies on the ``etp`` ranks from ``e // num_local * etp`` on.
    Returns:
        With N = ranks * max_tokens: tokens [N, D] and weights [N, K] in place, each token's local experts [N, K] int32 with
        ``num_local`` for those elsewhere, and [N] int32, a token's place or -1 where there is none. Tokens are unspecified there.
    Raises:
        ValueError: more tokens than the exchange was made for.
        PeerError: a rank was not there in time in an earlier transfer.
    """
    group = exchange(name)
    if len(x_TD) > group.max_tokens:
        raise ValueError(
            f"{len(x_TD)} tokens on this rank, but the expert dispatch was built for at most {group.max_tokens}; "
            "build it for the largest micro-batch"
        )
    peers = _peers(group, x_TD, experts_TK.shape[1])
    push = _launch_push_tokens if x_TD.is_cuda else push_tokens_reference
    return push(group, peers, x_TD, experts_TK, weights_TK, num_local, etp)


@torch.library.register_fake(push_tokens)
def _(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_slots(x_TD, weights_TK, exchange(name).slots)


@op("push_rows")
def push_rows(
    x_TD: Tensor, row_NK: Tensor, experts_TK: Tensor, num_rows: int, name: str, num_local: int, etp: int
) -> Tensor:  # fmt: skip
    """Copies every rank's tokens to this rank's rows.

    Args:
        x_TD: [T, D] this rank's tokens.
        row_NK: [N, K] integers in [-1, num_rows): rows of each place of :func:`push_tokens`; no row twice, -1 copies nowhere,
            and a token has rows only where one of its experts lies.
        experts_TK, num_local, etp: as given to :func:`push_tokens` on this rank.
    Returns:
        [num_rows, D]; rows that nobody names are unspecified.
    """
    group = exchange(name)
    peers = _peers(group, x_TD, row_NK.shape[1])
    push = _launch_push_rows if x_TD.is_cuda else push_rows_reference
    return push(group, peers, x_TD, row_NK, experts_TK, num_rows, num_local, etp)


@torch.library.register_fake(push_rows)
def _(x_TD: Tensor, row_NK: Tensor, experts_TK: Tensor, num_rows: int, name: str, num_local: int, etp: int) -> Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@op("push_sums")
def push_sums(
    rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds the rows of each place, sends the sum to the rank whose token has it, and adds what arrives, both in fp32.

    A sum is rounded to the rows' type on its way to another rank.

    Args:
        rows_RD: [R, D].
        row_NJ: [N, J] integers in [-1, R): the rows of each place; -1 adds nothing.
        slot_grads_NK: [N, K] gradients of the weights in each place, or None.
        experts_TK, num_local, etp: as given to :func:`push_tokens` on this rank.
    Returns:
        y [T, D] in the rows' type, zero for tokens without a row; the gradients of the weights [T, K], each the sum over its
        expert's ranks and zero where not routed, or [0, K] if ``slot_grads_NK`` is None.
    """
    group = exchange(name)
    peers = _peers(group, rows_RD, experts_TK.shape[1])
    push = _launch_push_sums if rows_RD.is_cuda else push_sums_reference
    return push(group, peers, rows_RD, row_NJ, slot_grads_NK, experts_TK, num_local, etp)


@torch.library.register_fake(push_sums)
def _(
    rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, K = experts_TK.shape
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    return rows_RD.new_empty(T, rows_RD.shape[1]), rows_RD.new_empty(0 if slot_grads_NK is None else T, K, dtype=dtype)
