"""The nvlink dispatcher between processes that share memory: whole training steps, compilation, and what it refuses."""

import pytest
import tiny
import torch
import torch.distributed as dist
from layout_runs import CLIPPED, assert_bitwise_replicas, assert_same_run, train
from rows import place_rows

from kernels.packed_tokens import Packing, unpack_tokens
from kernels.sort import sort_pairs
from parallelisms.dispatch import build_dispatcher
from parallelisms.folded_mesh import Layout
from parallelisms.routing import PairOrder, Routing

MODELS = {"qwen3": tiny.qwen3(), "deepseek": tiny.deepseek(num_experts=8)}
# model, dp_replicate, dp_shard, tp, ep, etp, how experts are recomputed
CASES = [
    ("qwen3", 1, 2, 1, 2, 1, "none"),
    ("qwen3", 1, 1, 2, 2, 1, "full"),  # ep over tp
    ("deepseek", 1, 2, 2, 4, 1, "none"),
    ("qwen3", 2, 1, 2, 2, 2, "selective"),
    ("qwen3", 1, 4, 2, 8, 1, "none"),
]


def _train(model: str, layout: Layout, recompute: str = "none", **parallel) -> dict:
    sequences = 12 // layout.dp
    tokens = sequences * tiny.SEQ // layout.tp
    options = {"recompute": recompute, "dispatch_tokens": tokens, "dispatch_sms": 3} | parallel
    return train(MODELS[model], layout, CLIPPED, 2, 12, sequences, tiny.padded_batch, **options)


@pytest.fixture(scope="module")
def single_process(pool):
    return {model: pool.run(1, _train, model, Layout())[0] for model in MODELS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_promise(pool, single_process, case) -> None:
    model, dp_replicate, dp_shard, tp, ep, etp, recompute = case
    layout = Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, etp=etp)
    ranks = pool.run(layout.world, _train_nvlink, model, layout, recompute)
    assert_same_run(ranks[0], single_process[model])
    assert_bitwise_replicas(ranks)


def _train_nvlink(model: str, layout: Layout, recompute: str) -> dict:
    return _train(model, layout, recompute, dispatcher="nvlink")


class _Unpack(torch.autograd.Function):
    """Values of packed tokens, whose gradient is that of what stands for them."""

    @staticmethod
    def forward(ctx, stand_in_ND, tokens):
        return unpack_tokens(tokens)

    @staticmethod
    def backward(ctx, grad_ND):
        return grad_ND, None


def _compiled_layer(packing: Packing | None) -> list[float]:
    """Dispatch, experts that multiply by the weight, and combine as one graph: how far the results are from the eager ones."""
    rank, T, D, K, E = dist.get_rank(), 9, 8, 2, 4
    generator = torch.Generator().manual_seed(rank)
    dispatcher = build_dispatcher("nvlink", E, dist.group.WORLD, 2, 1, T)
    experts_TK = torch.rand(T, E, generator=generator).argsort(1)[:, :K].contiguous()
    order = PairOrder(*sort_pairs(experts_TK.flatten(), E))
    inputs = [torch.randn(*size, generator=generator, requires_grad=True) for size in ((T, D), (T, K))]

    def layer(x_TD, weights_TK):
        x_TD = x_TD.sin()
        packed_TW = None if packing is None else packing.pack(x_TD)
        routed, handle = dispatcher.dispatch(x_TD, Routing(experts_TK, weights_TK, order), None, packed_TW)
        tokens_ND = routed.tokens_ND
        if packing is not None:
            tokens_ND = _Unpack.apply(tokens_ND, packing.received(routed.packed_NW, D))
        rows_RD = place_rows(tokens_ND, routed.row_NK, len(routed.pair_R))
        weights_R1 = place_rows(routed.weights_P[:, None], routed.row_NK.view(-1, 1), len(routed.pair_R))
        return dispatcher.combine(rows_RD * weights_R1, handle).square()

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y_TD = function(*inputs)
        results.append([y_TD, *torch.autograd.grad(y_TD.sum(), inputs)])
    return [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("packing", [None, Packing(blockwise=False)], ids=str)
def test_compiles_as_one_graph(pool, packing) -> None:
    for errors in pool.run(2, _compiled_layer, packing):
        assert len(errors) == 3 and max(errors) < 1e-6, errors


def _too_many_tokens() -> str:
    dispatcher = build_dispatcher("nvlink", 2, dist.group.WORLD, 2, 1, 3)
    experts_TK = torch.zeros(4, 1, dtype=torch.int64)
    routing = Routing(experts_TK, torch.ones(4, 1), PairOrder(*sort_pairs(experts_TK.flatten(), 2)))
    with pytest.raises(ValueError) as error:
        dispatcher.dispatch(torch.ones(4, 5), routing)
    return str(error.value)


def test_more_tokens_than_it_was_built_for(pool) -> None:
    for message in pool.run(2, _too_many_tokens):
        assert "4 tokens on this rank" in message and "at most 3" in message
