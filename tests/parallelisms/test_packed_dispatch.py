"""Tokens that travel in FP8: experts get the operands that they would have made, whatever the dispatcher."""

import pytest
import torch
import torch.distributed as dist
from rows import expert_weights, some_choices
from torch import Tensor

from float8.experts import Float8Products
from kernels.expert_mlp import expert_mlp
from kernels.packed_tokens import Packing, unpack_tokens
from kernels.sort import sort_pairs
from parallelisms.dispatch import Dispatcher, build_dispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.routing import PairOrder, Routing

T, D, F, K, EXPERTS, RANKS = 9, 128, 128, 3, 8, 4
# The dispatcher and the ranks of a domain.
KINDS = [("alltoall", None), ("nvlink", None), ("alltoall", 2), ("nvlink", 2)]
NAMES = ("y", "x", "routing weights", "w2", "w13")


def layer(
    dispatcher: Dispatcher, x_TD: Tensor, rank: int, experts: slice, blockwise: bool, packed: bool, wide_grad: bool = False
) -> dict[str, Tensor]:
    """Dispatch, the experts' MLP in FP8 and combine: the output, and the gradients; of the last rank no token is routed."""
    generator = torch.Generator().manual_seed(rank)
    experts_TK = some_choices(T, K, EXPERTS, rank == RANKS - 1, generator)
    w13, w2 = expert_weights(EXPERTS, D, F)
    leaves = x_TD.clone(), torch.rand(T, K, generator=generator), w2[experts].clone(), w13[experts].clone()
    x_TD, weights_TK, w2, w13 = (leaf.requires_grad_() for leaf in leaves)
    products = Float8Products(blockwise, wide_grad)
    products.packing = Packing(blockwise) if packed else None
    routing = Routing(experts_TK, weights_TK, PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS)))
    routed, handle = dispatcher.dispatch(x_TD, routing, None, products.packing.pack(x_TD) if packed else None)
    assert (routed.packed_NW is not None) == packed and routed.tokens_ND.dtype == torch.bfloat16
    x_ND, *names, packed_NW = routed
    y_TD = dispatcher.combine(expert_mlp(x_ND, w13, w2, *names, products=products, packed_NW=packed_NW), handle)
    y_TD.backward(torch.randn(T, D, generator=generator).bfloat16())
    return dict(zip(NAMES, (y_TD.detach(), x_TD.grad, weights_TK.grad, w2.grad, w13.grad), strict=True))


def tokens(rank: int) -> Tensor:
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(50 + rank))
    x_TD[1], x_TD[2, 3] = 0, 1e4
    return x_TD.bfloat16()


def compare(dispatcher: Dispatcher, rank: int, experts: slice) -> dict[bool, dict[str, Tensor]]:
    results = {}
    for blockwise in (False, True):
        x_TD, packing = tokens(rank), Packing(blockwise)
        rounded_TD = unpack_tokens(packing.received(packing.pack(x_TD), D)).bfloat16()
        plain, packed, rounded = (
            layer(dispatcher, x, rank, experts, blockwise, packs)
            for x, packs in ((x_TD, False), (x_TD, True), (rounded_TD, False))
        )
        for name in NAMES[:4]:
            assert torch.equal(packed[name], plain[name]), name
        wide = [layer(dispatcher, x, rank, experts, blockwise, packs, True) for x, packs in ((x_TD, True), (rounded_TD, False))]
        assert all(torch.equal(wide[0][name], wide[1][name]) for name in ("w2", "w13"))
        if blockwise:
            # The weight gradient quantises the tokens the other way, from what has arrived.
            assert 0 < error(packed["w13"], plain["w13"]) < 0.04
            assert error(packed["w13"], rounded["w13"]) < 4e-3  # `rounded` to bf16, which these scales need not fit
        else:
            # Tokens are quantised once, wherever.
            assert all(torch.equal(packed[name], other[name]) for other in (plain, rounded) for name in NAMES)
        results[blockwise] = packed
    return results


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def _compare(kinds: list) -> list[float]:
    """On each rank, and all dispatchers with each other: the largest difference."""
    rank, num_local, mesh = dist.get_rank(), EXPERTS // RANKS, FoldedMesh(Layout(dp_shard=RANKS, ep=RANKS), "cpu")
    experts, results = slice(rank * num_local, (rank + 1) * num_local), []
    for kind, domain in kinds:
        domains = None if domain is None else mesh.dispatch_domains(domain)
        dispatcher = build_dispatcher(kind, EXPERTS, mesh.dispatch_group, RANKS, 1, T, domains=domains)
        results.append(compare(dispatcher, rank, experts))
    return [
        (other[blockwise][name] - results[0][blockwise][name]).abs().max().item()
        / results[0][blockwise][name].abs().max().clamp(min=1e-9).item()
        for other in results[1:]
        for blockwise in (False, True)
        for name in NAMES
    ]


def test_dispatchers_agree(pool) -> None:
    """To a rounding of the sums on their way."""
    for differences in pool.run(RANKS, _compare, KINDS):
        assert max(differences) < 2.0**-6, differences


def test_one_rank() -> None:
    compare(LocalDispatcher(), 0, slice(0, EXPERTS))


@pytest.mark.parametrize(("D", "blockwise", "words"), [(7168, True, 1792 + 64), (2048, False, 512 + 16), (256, True, 80)])
def test_size_on_the_way(D, blockwise, words) -> None:
    """Of 7168 elements 7424 bytes, where bf16 has 14336."""
    packed_TW = Packing(blockwise).pack(torch.randn(3, D))
    assert packed_TW.shape == (3, words) and packed_TW.dtype == torch.int32


def test_unpacked_again() -> None:
    """To half a step of E4M3, and packed once more the same elements."""
    for blockwise in (False, True):
        packing = Packing(blockwise)
        x_TD, words_TW = tokens(0).float(), packing.pack(tokens(0))
        unpacked_TD = unpack_tokens(packing.received(words_TW, D))
        size_T1 = x_TD.abs().amax(1, keepdim=True)
        assert ((unpacked_TD - x_TD).abs() <= x_TD.abs() / 16 + size_T1 * 2.0**-17).all()
        again_TD = unpack_tokens(packing.received(packing.pack(unpacked_TD), D))
        assert error(again_TD, unpacked_TD) < (1e-6 if blockwise else 1e-30)
