"""Every dispatcher sends each token to the ranks of its experts and brings it back."""

import pytest
import torch
import torch.distributed as dist
from rows import place_rows

from kernels.sort import sort_pairs
from parallelisms.dispatch import Dispatcher, build_dispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.routing import PairOrder, RoutedTokens, Routing

T, D, K, EXPERTS = 7, 5, 3, 8
DEGREES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (8, 1), (1, 8)]
FILLED, PADDED, EMPTY = "every token", "some tokens", "no token on some ranks"


def make_routing(rank: int, fill: str) -> Routing:
    """K different experts for each of a rank's tokens, at equal weights."""
    generator = torch.Generator().manual_seed(rank)
    experts_TK = torch.rand(T, EXPERTS, generator=generator).argsort(dim=1)[:, :K]
    valid_T = torch.rand(T, generator=generator) < 0.6 if fill == PADDED else torch.full((T,), fill == FILLED or rank % 2 == 0)
    experts_TK = torch.where(valid_T[:, None], experts_TK, EXPERTS)
    weights_TK = (valid_T[:, None].double() / K).expand(T, K).contiguous()
    return Routing(experts_TK, weights_TK.requires_grad_(), PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS)))


def rows_of(routed: RoutedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that the routed tokens name, [R, D], and their weights, [R]: zero past the last offset."""
    rows_RD = place_rows(routed.tokens_ND, routed.row_NK, len(routed.pair_R))
    weights_R = place_rows(routed.weights_P[:, None], routed.row_NK.reshape(-1, 1), len(routed.pair_R)).squeeze(1)
    choices = routed.row_NK.shape[1]
    assert all(pair // choices == n for r, pair in enumerate(routed.pair_R.tolist()) if pair >= 0 for n in [named(routed, r)])
    return rows_RD, weights_R


def named(routed: RoutedTokens, row: int) -> int:
    """The token that says it stands at a row."""
    return (routed.row_NK == row).nonzero()[0, 0].item()


def token_names(rank: int) -> torch.Tensor:
    """[T, D] tokens whose every element tells rank and position."""
    return (100.0 * rank + torch.arange(T, dtype=torch.float64) + 1)[:, None].expand(T, D).contiguous()


def check_rows(routed, group_ranks: list[int], first_expert: int, num_local: int, fill: str) -> None:
    """The rows of each local expert are those tokens of the group that chose it, and none else; the tail is zero."""
    start = 0
    rows_RD, weights_R = rows_of(routed)
    for local, end in enumerate(routed.offsets_e.tolist()):
        wanted = [
            token_names(rank)[t, 0].item()
            for rank in group_ranks
            for t in range(T)
            if first_expert + local in make_routing(rank, fill).topk_experts_TK[t].tolist()
        ]
        assert rows_RD[start:end, 0].tolist() == wanted, f"expert {first_expert + local}"
        assert torch.equal(weights_R[start:end], torch.full((end - start,), 1 / K, dtype=torch.float64))
        start = end
    assert not rows_RD[start:].any() and not weights_R[start:].any() and (routed.pair_R[start:] == -1).all()
    assert len(routed.offsets_e) == num_local


def round_trip(dispatcher, rank: int, etp: int, fill: str, check) -> None:
    """Experts that multiply by the weight, each etp rank doing its part, give every valid token back."""
    routing, x_TD = make_routing(rank, fill), token_names(rank).requires_grad_()
    routed, handle = dispatcher.dispatch(x_TD, routing)
    check(routed)
    rows_RD, weights_R = rows_of(routed)
    y_TD = dispatcher.combine(rows_RD * weights_R[:, None] / etp, handle)
    valid_T1 = (routing.topk_experts_TK[:, :1] < EXPERTS).double()
    torch.testing.assert_close(y_TD, x_TD * valid_T1, rtol=1e-14, atol=0)
    grad_TD = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 50))
    y_TD.backward(grad_TD)
    torch.testing.assert_close(x_TD.grad, grad_TD * valid_T1, rtol=1e-13, atol=1e-14)
    weight_grad_TK = ((x_TD.detach() * grad_TD).sum(1, keepdim=True) * valid_T1).expand(T, K)
    torch.testing.assert_close(routing.topk_weights_TK.grad, weight_grad_TK, rtol=1e-12, atol=1e-12)


def build(kind: str, layout: Layout, domain: int | None) -> Dispatcher:
    mesh = FoldedMesh(layout, "cpu")
    domains = mesh.dispatch_domains(domain)
    assert (None if domains is None else domains.within.size()) == domain
    return build_dispatcher(kind, EXPERTS, mesh.dispatch_group, layout.ep, layout.etp, T, domains=domains)


def degrees_for(domain: int | None) -> list[tuple[int, int]]:
    """Those that spread experts over several domains."""
    return [(ep, etp) for ep, etp in DEGREES if ep * etp > (domain or 1)]


def _round_trips(kind: str, domain: int | None) -> int:
    rank, trips = dist.get_rank(), 0
    for ep, etp in degrees_for(domain):
        dispatcher = build(kind, Layout(dp_shard=2, tp=4, ep=ep, etp=etp), domain)
        num_local, first_rank = EXPERTS // ep, rank // (ep * etp) * ep * etp
        first_expert = (rank - first_rank) // etp * num_local
        # Tokens of ranks with the same place in their domains come from the same rank of this one.
        group_ranks = sorted(range(first_rank, first_rank + ep * etp), key=lambda rank: rank % (domain or 8))
        for fill in (FILLED, PADDED, EMPTY):
            round_trip(
                dispatcher,
                rank,
                etp,
                fill,
                lambda routed, fill=fill, at=(group_ranks, first_expert, num_local): check_rows(routed, *at, fill),
            )
            trips += 1
    return trips


# Of a dispatcher and the ranks of a domain.
KINDS = [("alltoall", None), ("allgather", None), ("nvlink", None)]
KINDS_OF_DOMAINS = [("alltoall", 2), ("alltoall", 4), ("nvlink", 2), ("nvlink", 4)]


@pytest.mark.parametrize(("kind", "domain"), KINDS + KINDS_OF_DOMAINS)
def test_identity_round_trip(pool, kind, domain) -> None:
    assert pool.run(8, _round_trips, kind, domain) == [3 * len(degrees_for(domain))] * 8


@pytest.mark.parametrize("fill", [FILLED, PADDED])
def test_identity_round_trip_on_one_rank(fill) -> None:
    round_trip(LocalDispatcher(), 0, 1, fill, lambda routed: check_rows(routed, [0], 0, EXPERTS, fill))


def _bf16_sum(kind: str, domain: int | None) -> float:
    """Eight partial sums of a token: one of 1 and seven of 2^-9, all of which bf16 addition would drop one by one."""
    dispatcher = build(kind, Layout(dp_shard=8, ep=1, etp=8), domain)
    experts_TK = torch.zeros(1, 1, dtype=torch.int64)
    routing = Routing(experts_TK, torch.ones(1, 1), PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS)))
    routed, handle = dispatcher.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing)
    part = 1.0 if dist.get_rank() == 0 else 2.0**-9
    return dispatcher.combine(rows_of(routed)[0] * part, handle).item()


@pytest.mark.parametrize(("kind", "domain"), [*KINDS, ("alltoall", 4), ("nvlink", 4)])
def test_partial_sums_are_added_in_fp32(pool, kind, domain) -> None:
    """Those of a domain are rounded on their way out of it, here from 1 + 3 * 2^-9 to 1 + 4 * 2^-9 and not at all."""
    expected = torch.tensor(1 + 7 * 2.0**-9).bfloat16().item()
    assert expected > 1 and pool.run(8, _bf16_sum, kind, domain) == [expected] * 8


def _tokens_received(layout: Layout, domain: int | None, hot: bool) -> list[tuple[int, int]]:
    """Ranks bring different numbers of tokens, the first one none: how many arrived by each hop, and how many are wanted there.

    If hot, every token goes to the last rank's experts.
    """
    rank, ep, etp = dist.get_rank(), layout.ep, layout.etp
    dispatcher = build("alltoall", layout, domain)
    everybodys = [make_routing(source, PADDED).topk_experts_TK[:source] for source in range(layout.world)]
    if hot:
        everybodys = [torch.where(chosen_TK < EXPERTS, EXPERTS - 1, EXPERTS)[:, :1] for chosen_TK in everybodys]
    experts_TK = everybodys[rank]
    order = PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS))
    weights_TK = torch.ones(experts_TK.shape, requires_grad=True)
    x_TD = token_names(rank)[:rank].requires_grad_()
    routed, handle = dispatcher.dispatch(x_TD, Routing(experts_TK, weights_TK, order))
    y_TD = dispatcher.combine(rows_of(routed)[0], handle)
    valid_T1, copies = (experts_TK[:, :1] < EXPERTS).double(), experts_TK.shape[1] * etp
    torch.testing.assert_close(y_TD, x_TD * valid_T1 * copies, rtol=1e-14, atol=0)
    y_TD.sum().backward()
    torch.testing.assert_close(x_TD.grad, (valid_T1 * copies).expand_as(x_TD), rtol=1e-14, atol=0)

    def wanted(ranks: range, sources: range) -> int:
        """Tokens of the sources that have an expert on one of the ranks."""
        holders = sorted({rank // etp for rank in ranks})
        return sum(int(torch.isin(everybodys[s] // (EXPERTS // ep), torch.tensor(holders)).any(1).sum()) for s in sources)

    received = [sum(trip.counts[1]) for trip in handle.trips]
    assert received[-1] == len(routed.tokens_ND)
    if domain is None:
        return [(received[0], wanted(range(rank, rank + 1), range(layout.world)))]
    first = rank // domain * domain
    here = wanted(range(first, first + domain), range(rank % domain, layout.world, domain))
    return list(zip(received, [here, wanted(range(rank, rank + 1), range(layout.world))], strict=True))


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    ("ep", "etp", "domain"),
    [(4, 1, None), (2, 2, None), (1, 4, None), (4, 1, 2), (2, 2, 2), (1, 4, 2), (8, 1, 2), (4, 2, 4), (2, 4, 2)],
)
def test_a_token_travels_once_to_each_domain_and_rank(pool, ep, etp, domain, hot) -> None:
    ranks = pool.run(ep * etp, _tokens_received, Layout(dp_shard=ep * etp, ep=ep, etp=etp), domain, hot)
    assert all(received == wanted for hops in ranks for received, wanted in hops)
    assert any(received for hops in ranks for received, _ in hops)


def test_auto_is_local_for_a_group_of_one() -> None:
    assert isinstance(build_dispatcher("auto", EXPERTS, None, 1, 1), LocalDispatcher)


def test_sort_pairs() -> None:
    pair_P, row_P, counts, offsets = sort_pairs(torch.tensor([2, 0, 3, 2, 3, 0]), 3)
    assert pair_P.tolist() == [1, 5, 0, 3, -1, -1]
    assert row_P.tolist() == [2, 0, -1, 3, -1, 1]
    assert counts.tolist() == [2, 0, 2]
    assert offsets.tolist() == [2, 2, 4] and offsets.dtype == torch.int32
