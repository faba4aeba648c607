"""Inputs of the transfers of :mod:`kernels.dispatch`, and by loops over tokens and choices what must come out."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.peers import Allocate, Exchange, Peers, TransferShape
from kernels.sort import sort_pairs_reference


class Case(NamedTuple):
    """Ranks ep * etp with ``tokens[rank]`` tokens each, D wide, K of E experts; one in ``drop`` tokens is not routed."""

    ep: int
    etp: int
    tokens: tuple[int, ...]
    D: int
    K: int
    E: int
    programs: int = 2
    dtype: torch.dtype = torch.float32
    drop: int = 4
    hot: bool = False

    @property
    def world(self) -> int:
        return self.ep * self.etp

    @property
    def num_local(self) -> int:
        return self.E // self.ep

    @property
    def max_tokens(self) -> int:
        return max(max(self.tokens), 1)


class Round(NamedTuple):
    """What all ranks put in, a list by rank each."""

    x: list[Tensor]
    experts: list[Tensor]
    weights: list[Tensor]
    rows: list[Tensor]
    grads: list[Tensor]
    slot_grads: list[Tensor]


def make_round(case: Case, seed: int) -> Round:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    N, inputs = case.world * case.max_tokens, Round([], [], [], [], [], [])
    for T in case.tokens:
        scores_TE = torch.rand(T, case.E, generator=generator)
        if case.hot:
            scores_TE[:, : case.num_local] += seed % 2  # in odd rounds, all tokens to the first rank
        experts_TK = scores_TE.argsort(dim=1, descending=True)[:, : case.K].contiguous()
        experts_TK[torch.randint(case.drop, (T,), generator=generator) == 0] = case.E
        inputs.x.append(randn(T, case.D, dtype=case.dtype))
        inputs.experts.append(experts_TK)
        inputs.weights.append(randn(T, case.K))
        inputs.rows.append(randn(N * min(case.K, case.num_local), case.D, dtype=case.dtype))
        inputs.grads.append(randn(T, case.D, dtype=case.dtype))
        inputs.slot_grads.append(randn(N, case.K))
    return inputs


class Expected(NamedTuple):
    """What one rank gets: its tokens by place, and the sums of its own tokens."""

    tokens_ND: Tensor
    weights_NK: Tensor
    key_NK: Tensor
    slot_N: Tensor
    row_NK: Tensor
    y_TD: Tensor
    by_place_TD: Tensor
    grads_TK: Tensor
    grad_rows_RD: Tensor


def expect(case: Case, inputs: Round, rank: int) -> Expected:
    """Everything by loops over tokens and choices, without any exchange."""
    T, slots = case.max_tokens, case.world * case.max_tokens
    tokens_ND, weights_NK = torch.zeros(slots, case.D, dtype=case.dtype), torch.zeros(slots, case.K)
    key_NK = torch.full((slots, case.K), case.num_local, dtype=torch.int32)
    rows_of = [row_table(case, inputs, other) for other in range(case.world)]
    grad_rows_RD = torch.zeros_like(inputs.rows[rank])
    for source in range(case.world):
        for t, chosen in enumerate(inputs.experts[source].tolist()):
            slot = source * T + t
            weights_NK[slot] = inputs.weights[source][t]
            for k, expert in enumerate(chosen):
                if expert // case.num_local == rank // case.etp:
                    key_NK[slot, k] = expert % case.num_local
                    tokens_ND[slot] = inputs.x[source][t]
                    grad_rows_RD[rows_of[rank][slot, k]] = inputs.grads[source][t]
    here_N = (key_NK < case.num_local).any(1)
    slot_N = torch.where(here_N, torch.arange(slots), -1).int()
    y_TD, by_place_TD = (torch.zeros(len(inputs.x[rank]), case.D) for _ in range(2))
    grads_TK = torch.zeros(len(inputs.x[rank]), case.K)
    for t, chosen in enumerate(inputs.experts[rank].tolist()):
        slot = rank * T + t
        for other in range(case.world):
            if any(expert // case.num_local == other // case.etp for expert in chosen):
                by_place_TD[t] += inputs.rows[other][slot].float()
            for k, expert in enumerate(chosen):
                if expert // case.num_local == other // case.etp:
                    y_TD[t] += inputs.rows[other][rows_of[other][slot, k]].float()
                    grads_TK[t, k] += inputs.slot_grads[other][slot, k]
    return Expected(tokens_ND, weights_NK, key_NK, slot_N, rows_of[rank], y_TD, by_place_TD, grads_TK, grad_rows_RD)


def row_table(case: Case, inputs: Round, rank: int) -> Tensor:
    """Some order of a rank's rows by expert."""
    key_NK = torch.full((case.world, case.max_tokens, case.K), case.num_local, dtype=torch.int32)
    for source, experts_TK in enumerate(inputs.experts):
        local_TK = experts_TK - rank // case.etp * case.num_local
        key_NK[source, : len(local_TK)] = torch.where((local_TK >= 0) & (local_TK < case.num_local), local_TK, case.num_local)
    return sort_pairs_reference(key_NK.flatten(), case.num_local)[1].view(-1, case.K)


class Received(NamedTuple):
    """What one round of transfers gave a rank: a token's way to its experts and back, forward and backward."""

    tokens: tuple[Tensor, Tensor, Tensor, Tensor]
    rows: Tensor
    sums: tuple[Tensor, Tensor]
    sums_by_place: tuple[Tensor, Tensor]
    words: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


def as_words(x_TD: Tensor) -> Tensor:
    """Tokens of any type as integers of 32 bits."""
    return x_TD.float().view(torch.int32)


def shapes(case: Case) -> list[TransferShape]:
    """Of the tokens, and of words where tokens are narrower."""
    dtypes = [case.dtype, torch.int32] if case.dtype == torch.bfloat16 else [case.dtype]
    return [TransferShape(case.D, case.K, dtype) for dtype in dtypes]


def allocator(memories: list[Tensor]) -> Allocate:
    """Half of every rank's memory for each of :func:`shapes`."""
    starts = iter((0, len(memories[0]) // 2))

    def allocate(*_) -> list[Tensor]:
        start = next(starts)
        return [memory[start:] for memory in memories]

    return allocate


def steps(ops: tuple, exchange: Exchange, peers: list[Peers], case: Case, inputs: Round, expected: Expected) -> list[Callable]:
    """One rank's transfers of one round, in the order of :class:`Received`; ``ops`` are push_tokens, push_rows and push_sums, and
    ``peers`` those of :func:`shapes`."""
    (push_tokens, push_rows, push_sums), rank, where = ops, exchange.rank, (exchange, peers[0])
    experts_TK, rows_RD, slot_grads_NK = inputs.experts[rank], inputs.rows[rank], inputs.slot_grads[rank]
    slot_N1, place = expected.slot_N[:, None], (case.num_local, case.etp)
    transfers = [
        lambda: push_tokens(*where, inputs.x[rank], experts_TK, inputs.weights[rank], *place),
        lambda: push_rows(*where, inputs.grads[rank], expected.row_NK, experts_TK, len(rows_RD), *place),
        lambda: push_sums(*where, rows_RD, expected.row_NK, None, experts_TK, *place),
        lambda: push_sums(*where, rows_RD, slot_N1, slot_grads_NK, experts_TK, *place),
    ]
    if len(peers) > 1:
        words_TD = as_words(inputs.x[rank])
        transfers.append(lambda: push_tokens(exchange, peers[1], words_TD, experts_TK, inputs.weights[rank], *place))
    return transfers


def judge(case: Case, received: Received, expected: Expected) -> dict[str, bool]:
    tokens_ND, weights_NK, key_NK, slot_N = received.tokens
    here_N, valid_NK = expected.slot_N >= 0, expected.key_NK < case.num_local
    named_R = expected.row_NK[valid_NK].long()
    return {
        "tokens": torch.equal(tokens_ND[here_N], expected.tokens_ND[here_N]),
        "words": received.words is None or torch.equal(received.words[0][here_N], as_words(expected.tokens_ND)[here_N]),
        "keys of words": received.words is None or torch.equal(received.words[2], expected.key_NK),
        "weights": torch.equal(weights_NK[valid_NK], expected.weights_NK[valid_NK]),
        "keys": torch.equal(key_NK, expected.key_NK),
        "places": torch.equal(slot_N, expected.slot_N),
        "sums": close(received.sums[0], expected.y_TD, case) and received.sums[1].shape == (0, case.K),
        "rows": torch.equal(received.rows[named_R], expected.grad_rows_RD[named_R]),
        "sums by place": close(received.sums_by_place[0], expected.by_place_TD, case),
        "gradients of weights": torch.allclose(received.sums_by_place[1], expected.grads_TK, rtol=1e-6, atol=1e-6),
    }


def close(actual: Tensor, expected: Tensor, case: Case) -> bool:
    """To a few roundings of the type: a rank's sum is rounded on its way, the total at its end."""
    rounding = 2.0**-7 if case.dtype == torch.bfloat16 else 1e-6
    scale = expected.abs().max().clamp(min=1) if expected.numel() else 1
    return actual.dtype == case.dtype and bool(((actual.float() - expected).abs() <= 2 * rounding * scale).all())
