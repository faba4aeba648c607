"""500 passes of the nvlink dispatcher between two GPUs under loads that change all the time.

Every token carries its origin, so that each rank can tell which rows it should have got, and every result is checked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpu_ranks import WORLD, join_group, run_ranks
from rows import place_rows
from torch import Tensor

from kernels.sort import sort_pairs
from parallelisms.dispatch import build_dispatcher
from parallelisms.dispatch.base import Dispatcher
from parallelisms.routing import PairOrder, Routing

D, K, E, MOST = 256, 4, 16, 512
LOCAL = E // WORLD
ROUNDS, SETTLED = 500, 20


@dataclass
class Inputs:
    """Of one rank and one round. Tokens that are not routed fill up to ``MOST``."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    grad_TD: Tensor

    def first(self, tokens: int) -> "Inputs":
        return Inputs(*(each[:tokens] for each in vars(self).values()))


def routed_tokens(number: int, rank: int) -> int:
    """All, in bursts with a rank that has few or none in between."""
    return (MOST, MOST, 333, 1, MOST, 0, 64)[(number // 3 + 2 * rank) % 7]


def biases(number: int, device: str) -> Tensor:
    """What makes experts popular: nothing, one that stays, one that moves on each round, three that move, a rank."""
    bias_E = torch.zeros(E, device=device)
    expert = number % E
    hot = ([], [5], [expert], [expert, (expert + 1) % E, (expert + 7) % E], range(number % 2 * LOCAL, number % 2 * LOCAL + LOCAL))
    bias_E[list(hot[number // 5 % 5])] = 0.9
    return bias_E


def make_inputs(number: int, rank: int, device: str = "cuda") -> Inputs:
    """The same on any rank. The first two numbers of a token are its place, in base 256 with the rank."""
    generator = torch.Generator(device).manual_seed(WORLD * number + rank)
    scores_TE = torch.rand(MOST, E, device=device, generator=generator) + biases(number, device)
    weights_TK, experts_TK = scores_TE.topk(K)
    experts_TK[routed_tokens(number, rank) :] = E
    experts_TK[::11, 1:] = E  # a single expert
    x_TD, grad_TD = (torch.randn(MOST, D, device=device, generator=generator).bfloat16() for _ in range(2))
    origin_T = rank * MOST + torch.arange(MOST, device=device)
    x_TD[:, 0], x_TD[:, 1] = origin_T // 256, origin_T % 256
    return Inputs(x_TD, weights_TK, experts_TK, grad_TD)


def pass_through(dispatcher: Dispatcher, inputs: Inputs) -> list[Tensor]:
    """Rows, their groups' ends, and with experts that multiply by the weight results and gradients of tokens and weights."""
    x_TD, weights_TK = inputs.x_TD.detach().requires_grad_(), inputs.weights_TK.detach().requires_grad_()
    order = PairOrder(*sort_pairs(inputs.experts_TK.flatten(), E))
    routed, handle = dispatcher.dispatch(x_TD, Routing(inputs.experts_TK, weights_TK, order))
    rows_RD = place_rows(routed.tokens_ND, routed.row_NK, len(routed.pair_R))
    weights_R1 = place_rows(routed.weights_P[:, None], routed.row_NK.view(-1, 1), len(routed.pair_R))
    y_TD = dispatcher.combine((rows_RD * weights_R1).bfloat16(), handle)
    return [rows_RD.detach(), routed.offsets_e, y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, weights_TK), inputs.grad_TD)]


def check(results: list[Tensor], rank: int, everyone: list[Inputs]) -> None:
    """Rows exactly; results to the rounding of the two sums that meet in a token."""
    rows_RD, offsets_e, *others = results
    x_ND, experts_NK = (torch.cat([getattr(each, name) for each in everyone]) for name in ("x_TD", "experts_TK"))
    start = 0
    for e, end in enumerate(offsets_e.tolist()):
        rows = rows_RD[start:end]
        origin_r = (rows[:, 0] * 256 + rows[:, 1].float()).long()
        wanted_r = (experts_NK == rank * LOCAL + e).any(1).nonzero().flatten()
        assert torch.equal(origin_r.sort().values, wanted_r), f"expert {e} got others' rows"
        assert torch.equal(rows, x_ND[origin_r]), f"expert {e} got rows that differ"
        start = end
    own = everyone[rank]
    chosen_TK = own.experts_TK < E
    factor_T1 = torch.where(chosen_TK, own.weights_TK, 0).double().sum(1, keepdim=True)
    products_TK = (own.x_TD.double() * own.grad_TD.double()).sum(1, keepdim=True)
    wanted = [own.x_TD * factor_T1, own.grad_TD * factor_T1, torch.where(chosen_TK, products_TK, 0)]
    for actual, expected in zip(others, wanted, strict=True):
        assert (actual.double() - expected).norm() <= 5e-3 * expected.norm()


def captured(dispatcher: Dispatcher, inputs: Inputs) -> Callable[[Inputs], list[Tensor]]:
    """The same passes as a CUDA graph."""
    fixed = Inputs(*(each.clone() for each in vars(inputs).values()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = pass_through(dispatcher, fixed)

    def replay(inputs: Inputs) -> list[Tensor]:
        for place, value in zip(vars(fixed).values(), vars(inputs).values(), strict=True):
            place.copy_(value)
        graph.replay()
        return results

    return replay


def same(ours: list[Tensor], others: list[Tensor], tokens: int) -> bool:
    """Bit for bit, of the rows those that groups have, and of the tokens the first ones."""
    (rows_RD, ends, *results), (other_rows_RD, other_ends, *other_results) = ours, others
    pairs = [(rows_RD[: ends[-1]], other_rows_RD[: ends[-1]]), (ends, other_ends)]
    pairs += [(ours, other[:tokens]) for ours, other in zip(results, other_results, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


def change_loads(rank: int, folder: str) -> None:
    join_group(rank, folder)
    dispatcher = build_dispatcher("nvlink", E, dist.group.WORLD, WORLD, 1, MOST)
    pass_through(dispatcher, make_inputs(0, rank))
    torch.cuda.synchronize()
    dist.barrier()
    replay = captured(dispatcher, make_inputs(0, rank))
    for number in range(ROUNDS):
        everyone = [make_inputs(number, each) for each in range(WORLD)]
        tokens = routed_tokens(number, rank)
        eager = pass_through(dispatcher, everyone[rank].first(tokens))
        replayed = replay(everyone[rank])
        check(replayed, rank, everyone)
        assert same(eager, replayed, tokens), f"round {number}: a replayed graph differs"
        del everyone, eager
        if number == SETTLED:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before[0]
    assert torch.cuda.mem_get_info()[0] >= before[1]
    dist.barrier()
    dist.destroy_process_group()


def test_changing_loads(tmp_path) -> None:
    assert run_ranks(change_loads, tmp_path, 300) == [0, 0]
