"""Gradients of tokens handed to the experts in place of those of their rows: the same numbers, bit for bit."""

import sys

import fake_deep_ep
import tiny
import torch
import torch.distributed as dist
from rows import expert_weights, some_choices
from torch import Tensor

from float8.experts import EmulatedProducts, Float8Products
from float8.recipes import RECIPES
from kernels.expert_mlp import HIGH_PRECISION, Products, expert_mlp
from kernels.permute import TokenGradients, unpermute
from kernels.sort import sort_pairs
from moe_titan.layers.moe import MoE
from parallelisms.dispatch import Dispatcher, build_dispatcher
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.routing import PairOrder, Routing

T, D, F, K, EXPERTS, RANKS = 9, 128, 128, 3, 8, 4
# The dispatcher, the ranks of a domain, and whether it hands the gradients over.
KINDS = [
    ("alltoall", None, True),
    ("nvlink", None, True),
    ("alltoall", 2, True),
    ("nvlink", 2, True),
    ("deepep", None, True),
    ("allgather", None, False),
    ("hybridep", None, False),
]
PRODUCTS = [
    HIGH_PRECISION,
    *(Float8Products(blockwise, wide_grad) for blockwise in (False, True) for wide_grad in (False, True)),
    EmulatedProducts(RECIPES["mxfp8"]),  # which does not take them by itself
]


class Counting(TokenGradients):
    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def take(self) -> Tensor | None:
        grad_TD = super().take()
        self.taken += grad_TD is not None
        return grad_TD


def layer(
    dispatcher: Dispatcher, rank: int, experts: slice, products: Products, recompute: bool, grads: Counting | None
) -> list[Tensor]:
    """The output and all gradients, those of a second backward too; every fourth token is routed nowhere, and none of the last
    rank's."""
    generator = torch.Generator().manual_seed(rank)
    experts_TK = some_choices(T, K, EXPERTS, rank == RANKS - 1, generator)
    w13, w2 = expert_weights(EXPERTS, D, F)
    x_TD, weights_TK = torch.randn(T, D, generator=generator).bfloat16(), torch.rand(T, K, generator=generator)
    leaves = [leaf.requires_grad_() for leaf in (x_TD, weights_TK, w13[experts].clone(), w2[experts].clone())]
    routing = Routing(experts_TK, leaves[1], PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS)))
    routed, handle = dispatcher.dispatch(leaves[0], routing)
    x_ND, weights_P, *index, _ = routed
    rows_RD = expert_mlp(x_ND, leaves[2], leaves[3], weights_P, *index, recompute, products, grads=grads)
    y_TD = dispatcher.combine(rows_RD, handle, grads)
    results = [y_TD.detach()]
    for _ in range(2):
        grad_TD = torch.randn(T, D, generator=generator).bfloat16()
        results += torch.autograd.grad(y_TD, leaves, grad_TD, retain_graph=True)
    return results


def compare(dispatcher: Dispatcher, rank: int, experts: slice, hands_over: bool) -> None:
    for products in PRODUCTS:
        for recompute in (False, True):
            grads = Counting()
            expected = layer(dispatcher, rank, experts, products, recompute, None)
            actual = layer(dispatcher, rank, experts, products, recompute, grads)
            assert all(map(torch.equal, actual, expected))
            assert grads.taken == (2 if hands_over else 0)


def _compare(kinds: list) -> None:
    sys.modules["deep_ep"] = fake_deep_ep
    rank, num_local, mesh = dist.get_rank(), EXPERTS // RANKS, FoldedMesh(Layout(dp_shard=RANKS, ep=RANKS), "cpu")
    for kind, domain, hands_over in kinds:
        domains = None if domain is None else mesh.dispatch_domains(domain)
        dispatcher = build_dispatcher(kind, EXPERTS, mesh.dispatch_group, RANKS, 1, T, domains=domains)
        compare(dispatcher, rank, slice(rank * num_local, (rank + 1) * num_local), hands_over)


def test_dispatchers(pool) -> None:
    pool.run(RANKS, _compare, KINDS)


def test_one_rank() -> None:
    compare(LocalDispatcher(), 0, slice(0, EXPERTS), True)


def test_autograd_has_no_copy_for_every_row() -> None:
    seen = []
    rows_RD = torch.randn(6, 4, requires_grad=True)
    rows_RD.register_hook(lambda grad: seen.append(grad.untyped_storage().nbytes()))
    grads = TokenGradients()
    unpermute(rows_RD, torch.tensor([[0, 3], [5, -1]]), grads).sum().backward()
    assert seen == [4] and torch.equal(grads.take(), torch.ones(2, 4)) and grads.take() is None


def test_layers_in_fp8_hand_them_over(monkeypatch) -> None:
    """With the gradients of layers that do not; and others do not, whose products read rows."""
    put, original = [], TokenGradients.put
    monkeypatch.setattr(TokenGradients, "put", lambda self, grad, rows: put.append(rows) or original(self, grad, rows))
    _, args = tiny.qwen3(num_experts=6)
    gradients, rows = [], Float8Products(False, False)
    rows.takes_token_grads = False
    for products, calls in ((HIGH_PRECISION, 0), (Float8Products(False, False), 1), (rows, 0)):
        torch.manual_seed(0)
        layer = MoE(args.moe_args, 128, 128, layer="layers.0").bfloat16()
        layer.router.float()
        with torch.no_grad():
            layer.init_weights(0.5, torch.device("cpu"))
        layer.experts.products = products
        put.clear()
        layer(torch.randn(2, 5, 128).bfloat16()).float().square().sum().backward()
        assert len(put) == calls
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert all(map(torch.equal, *gradients[1:])) and gradients[1][1].any()
