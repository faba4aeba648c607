"""The adapters of DeepEP and HybridEP give what the all-to-all gives, by stand-ins with the signatures of the two packages."""

import sys

import fake_deep_ep
import pytest
import torch
import torch.distributed as dist
from rows import place_rows

from kernels.sort import sort_pairs
from parallelisms.dispatch import build_dispatcher
from parallelisms.routing import PairOrder, Routing

T, D, K, EXPERTS = 9, 16, 3, 8


def round_trip(kind: str, dropped: int) -> list[torch.Tensor]:
    """Offsets, rows and weights, and output and gradients of experts that multiply by the weight and by the expert's number."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    experts_TK = torch.rand(T, EXPERTS, generator=generator).argsort(1)[:, :K]
    experts_TK[: rank * dropped] = EXPERTS
    x_TD, grad_TD = (torch.randn(T, D, generator=generator).bfloat16() for _ in range(2))
    weights_TK = torch.rand(T, K, generator=generator) * (experts_TK < EXPERTS)
    inputs = x_TD.requires_grad_(), weights_TK.requires_grad_()
    dispatcher = build_dispatcher(kind, EXPERTS, dist.group.WORLD, world, 1, max_tokens=T, sms=4)
    order = PairOrder(*sort_pairs(experts_TK.flatten(), EXPERTS))
    routed, handle = dispatcher.dispatch(x_TD, Routing(experts_TK, weights_TK, order))
    rows_RD = place_rows(routed.tokens_ND, routed.row_NK, len(routed.pair_R))
    weights_R1 = place_rows(routed.weights_P[:, None], routed.row_NK.reshape(-1, 1), len(routed.pair_R))
    expert_R = torch.searchsorted(routed.offsets_e, torch.arange(len(rows_RD)), right=True) + 1
    y_TD = dispatcher.combine((rows_RD * weights_R1 * expert_R[:, None]).bfloat16(), handle)
    return [routed.offsets_e, rows_RD.detach(), weights_R1.detach(), y_TD.detach(), *torch.autograd.grad(y_TD, inputs, grad_TD)]


def _differences(kind: str, dropped: int) -> list[str]:
    sys.modules["deep_ep"] = fake_deep_ep
    names = ("offsets", "rows", "weights", "output", "gradient of the tokens", "gradient of the weights")
    differences = []
    for name, actual, expected in zip(names, round_trip(kind, dropped), round_trip("alltoall", dropped), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape and expected.any(), name
        exact = name in names[:3]
        if not torch.allclose(actual.double(), expected.double(), rtol=0 if exact else 2.0**-7, atol=0 if exact else 1e-6):
            differences.append(name)
    return differences


@pytest.mark.parametrize("dropped", [0, 2], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["deepep", "hybridep"])
def test_equals_alltoall(pool, kind, world, dropped) -> None:
    assert pool.run(world, _differences, kind, dropped) == [[]] * world


def _buffers() -> tuple[int, int]:
    sys.modules["deep_ep"] = fake_deep_ep
    for _ in range(2):
        round_trip("deepep", 0)
    return fake_deep_ep.Buffer.num_sms, fake_deep_ep.Buffer.built


def test_layers_share_a_buffer_of_the_given_multiprocessors(pool) -> None:
    assert pool.run(2, _buffers) == [(4, 1)] * 2
