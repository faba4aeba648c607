"""Multi-token prediction on any layout, recomputed, compiled: the numbers of one process."""

from copy import copy
from dataclasses import replace

import pytest
import tiny
from layout_runs import CLIPPED, assert_bitwise_replicas, assert_same_run, train, train_counting_graphs

from parallelisms.folded_mesh import Layout

OPTIONS = replace(CLIPPED, mtp_layers=2, sequence_balance_coeff=0.1, eos_id=7)
MODELS = {"qwen3": tiny.qwen3(), "deepseek": tiny.deepseek(), "qwen3_tied": tiny.qwen3(), "flex": tiny.deepseek()}
for name, changes in {
    "qwen3_tied": {"enable_weight_tying": True},
    "flex": {"attn_type": "flex", "attn_mask_type": "block_causal"},
}.items():
    MODELS[name] = MODELS[name][0], copy(MODELS[name][1])
    vars(MODELS[name][1]).update(changes)


def L(dp_replicate: int, dp_shard: int, tp: int, ep: int, etp: int) -> Layout:
    return Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, etp=etp)


CASES = [
    ("deepseek", L(1, 2, 1, 1, 1), {}),
    ("qwen3_tied", L(1, 2, 1, 2, 1), {}),
    ("qwen3_tied", L(1, 1, 2, 1, 1), {}),
    ("qwen3", L(1, 1, 2, 2, 1), {}),
    ("flex", L(1, 1, 2, 1, 2), {}),
    ("qwen3", L(2, 1, 1, 2, 1), {"reshard_after_forward": False}),
    ("deepseek", L(1, 2, 2, 2, 1), {}),
    ("qwen3_tied", L(1, 2, 2, 4, 1), {}),
    ("flex", L(2, 2, 1, 2, 1), {}),
    ("deepseek", L(1, 1, 4, 2, 2), {}),
    ("qwen3", L(1, 4, 1, 2, 1), {"recompute": "full"}),
    ("qwen3", L(2, 2, 2, 8, 1), {}),
    ("deepseek", L(2, 2, 2, 2, 4), {"recompute": "selective"}),
]
FULL, BY_OPERATION = {"recompute": "full"}, {"recompute": "selective"}
EVERY_SECOND = {"recompute": "selective", "recompute_option": "2"}
COMPILED = {"compile_backend": "aot_eager"}
FOLDED = Layout(dp_shard=2, tp=2, ep=2)
WAYS = [
    *(("deepseek", Layout(), way) for way in (FULL, BY_OPERATION, EVERY_SECOND, COMPILED, COMPILED | BY_OPERATION)),
    ("qwen3", Layout(), COMPILED | FULL),
    ("flex", Layout(), COMPILED),
    *(("qwen3", FOLDED, way) for way in (FULL, BY_OPERATION, COMPILED | FULL)),
    ("deepseek", FOLDED, COMPILED | BY_OPERATION),
]


def case_id(value: object) -> str:
    if isinstance(value, Layout):
        return f"dpr{value.dp_replicate}-dps{value.dp_shard}-tp{value.tp}-ep{value.ep}-etp{value.etp}"
    return str(value)


def _train(model: str, layout: Layout, parallel: dict) -> dict:
    local_batch = 12 // (2 * layout.dp) if layout.dp < 4 else 3
    return train(MODELS[model], layout, OPTIONS, steps=2, samples=12, local_batch=local_batch, **parallel)


@pytest.fixture(scope="module")
def single_process(pool):
    cache: dict[str, dict] = {}

    def run(model: str) -> dict:
        if model not in cache:
            cache[model] = pool.run(1, _train, model, Layout(), {})[0]
        return cache[model]

    return run


@pytest.mark.parametrize(("model", "layout", "parallel"), CASES, ids=case_id)
def test_layout_promise(pool, single_process, model, layout, parallel) -> None:
    ranks = pool.run(layout.world, _train, model, layout, parallel)
    assert all(loss > 2 for loss in ranks[0]["mtp"])
    assert_same_run(ranks[0], single_process(model))
    assert_bitwise_replicas(ranks)


def _run(model: str, layout: Layout, parallel: dict) -> dict:
    return train_counting_graphs(MODELS[model], layout, OPTIONS, steps=3, **parallel)


@pytest.fixture(scope="module")
def eager(pool):
    cache: dict[str, dict] = {}

    def run(model: str, layout: Layout) -> dict:
        key = f"{model} {layout}"
        if key not in cache:
            cache[key] = pool.run(layout.world, _run, model, layout, {})[0]
        return cache[key]

    return run


@pytest.mark.parametrize(("model", "layout", "parallel"), WAYS, ids=case_id)
def test_recomputed_and_compiled_without_recompilation(pool, eager, model, layout, parallel) -> None:
    run = pool.run(layout.world, _run, model, layout, parallel)[0]
    assert (run["graphs"] > 0) == ("compile_backend" in parallel)
    assert_same_run(run, eager(model, layout))
