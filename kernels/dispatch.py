"""Tokens to the ranks of their experts and back, through memory that the ranks share, without a host sync.

``pull_tokens`` brings each token once to every rank that holds one of its experts. ``push_sums`` is its adjoint: it adds up the
rows of one token on each rank, sends that sum to the token's rank, and adds the ranks' sums there in fp32. ``pull_rows`` is the
adjoint of ``push_sums``: a token goes straight to the rows of its choices. All three are collective: every rank of an exchange
calls the same ones in the same order, even without tokens. No shape depends on data.

Token t of rank s has place (slot) ``s * max_tokens + t`` on every rank, so nobody has to count or to agree on anything; places of
tokens without an expert on a rank stay unwritten and unread there.
"""

import time

import torch
import triton
from torch import Tensor

from kernels.dispatch_kernels import pull_kernel, push_kernel
from kernels.peers import PULL, PUSH, STEPS, Exchange, Peers, TransferShape, exchange

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _new_slots(x_TD: Tensor, weights_TK: Tensor, slots: int) -> Outputs:
    K = weights_TK.shape[1]
    key_NK, slot_N = (x_TD.new_empty(size, dtype=torch.int32) for size in ((slots, K), (slots,)))
    return x_TD.new_empty(slots, x_TD.shape[1]), weights_TK.new_empty(slots, K), key_NK, slot_N


def _meet_reference(group: Exchange, peers: Peers, kind: int, piece: int) -> None:
    """Signals that this rank has come to the end of a piece, and waits for the others; with the last piece a transfer ends."""
    transfers = peers.state[kind * group.programs]
    count = transfers * STEPS + piece + 1
    for memory in peers.memories:
        memory.signals[kind, group.rank] = count
    deadline = time.monotonic() + group.timeout
    while (missing := (peers.memories[group.rank].signals[kind, :, 0] < count).nonzero()).numel():
        if time.monotonic() > deadline:
            peers.failure.fill_(int(missing[0]) + 1)
            group.check(peers)
        time.sleep(0)
    transfers += piece == STEPS - 1


def _stage_reference(group: Exchange, peers: Peers, x_TD: Tensor, meta: tuple[Tensor, Tensor] | None) -> Tensor:
    """Puts tokens where others find them, and returns everybody's, by place."""
    T = len(x_TD)
    _meet_reference(group, peers, PULL, 0)  # nobody is still reading
    peers.memories[group.rank].staged[:T] = x_TD
    if meta is not None:
        for memory in peers.memories:
            for place, of_tokens in zip((memory.experts, memory.weights), meta, strict=True):
                place[group.rank, :T] = of_tokens.to(place.dtype)
                place[group.rank, T:] = -1
    _meet_reference(group, peers, PULL, STEPS - 1)
    return torch.cat([memory.staged for memory in peers.memories])


def pull_tokens_reference(
    group: Exchange, peers: Peers, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, first_expert: int, num_local: int
) -> Outputs:
    staged_ND = _stage_reference(group, peers, x_TD, (experts_TK, weights_TK))
    tokens_ND, slot_weights_NK, key_NK, slot_N = _new_slots(x_TD, weights_TK, group.slots)
    local_NK = peers.memories[group.rank].experts.flatten(0, 1) - first_expert
    key_NK.copy_(torch.where((local_NK >= 0) & (local_NK < num_local), local_NK, num_local))
    slot_weights_NK.copy_(peers.memories[group.rank].weights.flatten(0, 1))
    here_N = (key_NK < num_local).any(1)
    slot_N.copy_(torch.where(here_N, torch.arange(group.slots), -1))
    tokens_ND[here_N] = staged_ND[here_N]
    return tokens_ND, slot_weights_NK, key_NK, slot_N


def pull_rows_reference(group: Exchange, peers: Peers, x_TD: Tensor, row_NK: Tensor, num_rows: int) -> Tensor:
    staged_ND = _stage_reference(group, peers, x_TD, None)
    rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    slot_P, k_P = (row_NK >= 0).nonzero(as_tuple=True)
    rows_RD[row_NK[slot_P, k_P].long()] = staged_ND[slot_P]
    return rows_RD


def push_sums_reference(
    group: Exchange, peers: Peers, rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor,
    num_local: int, etp: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, K = experts_TK.shape
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    _meet_reference(group, peers, PUSH, 0)
    for target, memory in enumerate(peers.memories):
        slots = slice(target * group.max_tokens, (target + 1) * group.max_tokens)
        picked_TJD = rows_RD[row_NJ[slots].clamp(min=0).long()].to(wide)
        here_TJ1 = (row_NJ[slots] >= 0).unsqueeze(-1)
        memory.sums[group.rank] = torch.where(here_TJ1, picked_TJD, 0).sum(1).to(rows_RD.dtype)
        if slot_grads_NK is not None:
            memory.grads[group.rank] = slot_grads_NK[slots]
    _meet_reference(group, peers, PUSH, STEPS - 1)
    own = peers.memories[group.rank]
    holder_TK = experts_TK // num_local
    y_TD, grads_TK = rows_RD.new_zeros(T, rows_RD.shape[1], dtype=wide), torch.zeros(T, K, dtype=own.grads.dtype)
    for peer in range(group.world):
        there_TK = holder_TK == peer // etp
        y_TD += torch.where(there_TK.any(1, keepdim=True), own.sums[peer, :T].to(wide), 0)
        grads_TK += torch.where(there_TK, own.grads[peer, :T], 0)
    return y_TD.to(rows_RD.dtype), grads_TK if slot_grads_NK is not None else grads_TK.new_empty(0, K)


def _launch_sizes(group: Exchange, D: int, K: int, device: torch.device, tile: int) -> dict[str, int | bool]:
    return {
        "D": D,
        "max_tokens": group.max_tokens,
        "rank": group.rank,
        "tiles": triton.cdiv(group.max_tokens, group.programs * STEPS * tile),
        "limit": int(group.timeout * 1e9),
        "K": K,
        "K_P": triton.next_power_of_2(K),
        "WORLD": group.world,
        "WORLD_P": triton.next_power_of_2(group.world),
        "TILE": tile,
        "BLOCK_D": min(triton.next_power_of_2(D), 1024),
        "CLOCK": device.type == "cuda",
        "num_warps": 8,
    }


def _launch_pull_tokens(
    group: Exchange, peers: Peers, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, first_expert: int, num_local: int
) -> Outputs:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, K), D = experts_TK.shape, x_TD.shape[1]
    outputs = tokens_ND, slot_weights_NK, key_NK, slot_N = _new_slots(x_TD, weights_TK, group.slots)
    pull_kernel[(group.programs,)](
        x_TD, experts_TK.contiguous(), weights_TK.contiguous(), None, tokens_ND, key_NK, slot_weights_NK, slot_N,
        peers.state, peers.table, peers.failure.data_ptr(), T, stride_t=x_TD.stride(0), first_expert=first_expert,
        num_local=num_local, META=True, **_launch_sizes(group, D, K, x_TD.device, tile=16),
    )  # fmt: skip
    return outputs


def _launch_pull_rows(group: Exchange, peers: Peers, x_TD: Tensor, row_NK: Tensor, num_rows: int) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, D), K = x_TD.shape, row_NK.shape[1]
    rows_RD = x_TD.new_empty(num_rows, D)
    pull_kernel[(group.programs,)](
        x_TD, None, None, row_NK.contiguous(), rows_RD, None, None, None, peers.state, peers.table, peers.failure.data_ptr(),
        T, stride_t=x_TD.stride(0), first_expert=0, num_local=0, META=False, **_launch_sizes(group, D, K, x_TD.device, tile=16),
    )  # fmt: skip
    return rows_RD


def _launch_push_sums(
    group: Exchange, peers: Peers, rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor,
    num_local: int, etp: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, K), D = experts_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    grads_TK = peers.memories[0].grads.new_empty(T if slot_grads_NK is not None else 0, K)
    push_kernel[(group.programs,)](
        rows_RD.contiguous(), row_NJ.contiguous(), None if slot_grads_NK is None else slot_grads_NK.contiguous(),
        experts_TK.contiguous(), y_TD, grads_TK, peers.state, peers.table, peers.failure.data_ptr(), T,
        num_local=num_local, etp=etp, WITH_GRADS=slot_grads_NK is not None, CHOICES=row_NJ.shape[1],
        **_launch_sizes(group, D, K, rows_RD.device, tile=8),
    )  # fmt: skip
    return y_TD, grads_TK


def _peers(group: Exchange, x: Tensor, K: int) -> Peers:
    return group.peers(TransferShape(x.shape[1], K, x.dtype), x.device)


@torch.library.custom_op("moe_titan::pull_tokens", mutates_args=())
def pull_tokens(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, name: str, first_expert: int, num_local: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Brings every token that has an expert on this rank.

    Args:
        x_TD: [T, D] this rank's tokens, T at most the exchange's ``max_tokens``; ranks may differ in T.
        experts_TK: [T, K] integers; an index that no rank holds is not routed.
        weights_TK: [T, K] in the tokens' type, or fp32 where that is narrower.
        name: of the exchange.
        first_expert, num_local: this rank's experts.
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
    pull = _launch_pull_tokens if x_TD.is_cuda else pull_tokens_reference
    return pull(group, peers, x_TD, experts_TK, weights_TK, first_expert, num_local)


@pull_tokens.register_fake
def _(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, name: str, first_expert: int, num_local: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_slots(x_TD, weights_TK, exchange(name).slots)


@torch.library.custom_op("moe_titan::pull_rows", mutates_args=())
def pull_rows(x_TD: Tensor, row_NK: Tensor, num_rows: int, name: str) -> Tensor:
    """Copies every rank's tokens to this rank's rows.

    Args:
        x_TD: [T, D] this rank's tokens.
        row_NK: [N, K] integers in [-1, num_rows): rows of each place of :func:`pull_tokens`; no row twice, -1 copies nowhere.
    Returns:
        [num_rows, D]; rows that nobody names are unspecified.
    """
    group = exchange(name)
    peers = _peers(group, x_TD, row_NK.shape[1])
    return (_launch_pull_rows if x_TD.is_cuda else pull_rows_reference)(group, peers, x_TD, row_NK, num_rows)


@pull_rows.register_fake
def _(x_TD: Tensor, row_NK: Tensor, num_rows: int, name: str) -> Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@torch.library.custom_op("moe_titan::push_sums", mutates_args=())
def push_sums(
    rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds the rows of each place, sends the sum to the rank whose token has it, and adds what arrives, both in fp32.

    A sum is rounded to the rows' type on its way to another rank.

    Args:
        rows_RD: [R, D].
        row_NJ: [N, J] integers in [-1, R): the rows of each place; -1 adds nothing.
        slot_grads_NK: [N, K] gradients of the weights in each place, or None.
        experts_TK: [T, K] as given to :func:`pull_tokens` on this rank.
        num_local, etp: expert e lies on the ``etp`` ranks from ``e // num_local * etp`` on.
    Returns:
        y [T, D] in the rows' type, zero for tokens without a row; the gradients of the weights [T, K], each the sum over its
        expert's ranks and zero where not routed, or [0, K] if ``slot_grads_NK`` is None.
    """
    group = exchange(name)
    peers = _peers(group, rows_RD, experts_TK.shape[1])
    push = _launch_push_sums if rows_RD.is_cuda else push_sums_reference
    return push(group, peers, rows_RD, row_NJ, slot_grads_NK, experts_TK, num_local, etp)


@push_sums.register_fake
def _(
    rows_RD: Tensor, row_NJ: Tensor, slot_grads_NK: Tensor | None, experts_TK: Tensor, name: str, num_local: int, etp: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, K = experts_TK.shape
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    return rows_RD.new_empty(T, rows_RD.shape[1]), rows_RD.new_empty(0 if slot_grads_NK is None else T, K, dtype=dtype)
