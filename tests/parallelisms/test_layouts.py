"""Any layout, same numbers: three clipped, accumulated steps on every layout against one process."""

from dataclasses import replace

import pytest
import tiny
from layout_runs import CLIPPED, assert_bitwise_replicas, assert_same_run, relative_error, train

from parallelisms.folded_mesh import Layout

BALANCED = replace(CLIPPED, sequence_balance_coeff=0.1, batch_balance_coeff=0.05)
MODELS = {
    "qwen3": tiny.qwen3(),
    "qwen3_6_shared": tiny.qwen3(num_experts=6, num_shared_experts=1, score_func="sigmoid", route_norm=False),
    "deepseek": tiny.deepseek(),
    "deepseek_8_groups": tiny.deepseek(
        num_experts=8, score_func="softmax", num_expert_groups=4, num_limited_groups=2, gate_bias=True
    ),
}


def L(dp_replicate: int, dp_shard: int, tp: int, ep: int, etp: int) -> Layout:
    return Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, etp=etp)


# model, layout, dispatcher. Degrees: dp_replicate, dp_shard, tp, then ep, etp.
CASES = [
    # World 2.
    ("qwen3", L(1, 2, 1, 1, 1), "auto"),
    ("deepseek", L(2, 1, 1, 1, 1), "local"),
    ("deepseek", L(1, 1, 2, 1, 1), "local"),
    ("deepseek", L(1, 2, 1, 2, 1), "auto"),
    ("qwen3", L(2, 1, 1, 2, 1), "alltoall"),  # ep over dp_replicate only
    ("qwen3_6_shared", L(1, 1, 2, 2, 1), "allgather"),  # ep over tp only, ep > dp
    ("deepseek_8_groups", L(1, 1, 2, 1, 2), "alltoall"),
    ("qwen3_6_shared", L(1, 2, 1, 1, 2), "allgather"),  # etp without tp
    # World 4.
    ("deepseek", L(1, 4, 1, 1, 1), "auto"),  # 6 experts over 4 ranks
    ("qwen3", L(1, 2, 2, 4, 1), "alltoall"),  # ep = world
    ("deepseek_8_groups", L(1, 2, 2, 4, 1), "allgather"),
    ("deepseek", L(1, 2, 2, 2, 1), "alltoall"),  # ep over tp only; 3 experts over 2 ranks
    ("qwen3_6_shared", L(1, 4, 1, 2, 1), "alltoall"),
    ("qwen3", L(1, 1, 4, 4, 1), "alltoall"),
    ("deepseek", L(1, 1, 4, 2, 2), "alltoall"),
    ("deepseek_8_groups", L(2, 2, 1, 4, 1), "alltoall"),
    ("deepseek", L(2, 2, 1, 2, 1), "allgather"),
    ("deepseek", L(2, 1, 2, 2, 1), "alltoall"),
    ("qwen3_6_shared", L(1, 2, 2, 2, 2), "allgather"),
    ("qwen3", L(1, 2, 2, 1, 4), "alltoall"),  # etp > tp
    ("deepseek_8_groups", L(4, 1, 1, 2, 1), "alltoall"),
    # World 8.
    ("deepseek", L(1, 8, 1, 1, 1), "auto"),  # fewer experts than ranks: sharded within
    ("qwen3", L(1, 4, 2, 8, 1), "alltoall"),
    ("deepseek", L(1, 4, 2, 2, 1), "alltoall"),  # 3 experts over 4 ranks
    ("deepseek_8_groups", L(1, 2, 4, 4, 1), "allgather"),
    ("qwen3", L(2, 2, 2, 8, 1), "alltoall"),
    ("deepseek_8_groups", L(2, 2, 2, 4, 2), "alltoall"),
    ("qwen3", L(2, 4, 1, 4, 1), "alltoall"),  # HSDP, one expert-data replica
    ("deepseek_8_groups", L(2, 4, 1, 8, 1), "alltoall"),  # HSDP, ep over all data ranks
    ("qwen3_6_shared", L(1, 2, 4, 2, 4), "alltoall"),
    ("qwen3", L(1, 1, 8, 8, 1), "alltoall"),
    ("deepseek", L(4, 2, 1, 2, 2), "allgather"),
]


# model, layout, dispatcher, ranks of a domain.
CASES_OF_DOMAINS = [
    ("qwen3", L(1, 2, 2, 4, 1), "alltoall", 2),
    ("deepseek_8_groups", L(2, 2, 2, 8, 1), "auto", 4),
    ("qwen3_6_shared", L(1, 2, 4, 2, 4), "alltoall", 2),
    ("deepseek_8_groups", L(1, 4, 2, 4, 2), "nvlink", 4),
]


def case_id(case: tuple) -> str:
    model, layout, dispatcher = case
    dense = f"dpr{layout.dp_replicate}-dps{layout.dp_shard}-tp{layout.tp}"
    return f"{model}-{dense}-ep{layout.ep}-etp{layout.etp}-{dispatcher}"


def local_batch(layout: Layout) -> int:
    """Sequences in a micro-batch: 3 per rank with data parallelism, else fewer, larger ones to save time."""
    return {1: 12, 2: 6}.get(layout.dp, 3) if layout.tp > 1 else 3


@pytest.fixture(scope="module")
def single_process(pool):
    cache: dict[str, dict] = {}

    def run(model: str, **options) -> dict:
        key = f"{model} {options}"
        if key not in cache:
            cache[key] = pool.run(1, _train, model, Layout(), "auto", options)[0]
        return cache[key]

    return run


def _train(model: str, layout: Layout, dispatcher: str, options: dict) -> dict:
    options = {"local_batch": local_batch(layout)} | options
    return train(MODELS[model], layout, dispatcher=dispatcher, **options)


def test_the_set_of_layouts_is_wide() -> None:
    layouts = {layout for _, layout, _ in CASES}
    assert len(layouts) >= 26
    assert {layout.world for layout in layouts} == {2, 4, 8}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layout_promise(pool, single_process, case) -> None:
    model, layout, dispatcher = case
    ranks = pool.run(layout.world, _train, model, layout, dispatcher, {})
    assert all(norm > CLIPPED.max_norm for norm in ranks[0]["norm"])
    assert_same_run(ranks[0], single_process(model))
    assert_bitwise_replicas(ranks)


@pytest.mark.parametrize(("model", "layout", "dispatcher", "domain"), CASES_OF_DOMAINS, ids=str)
def test_layout_promise_across_domains(pool, single_process, model, layout, dispatcher, domain) -> None:
    options = {"dispatch_domain": domain, "dispatch_tokens": local_batch(layout) * tiny.SEQ // layout.tp, "dispatch_sms": 3}
    ranks = pool.run(layout.world, _train, model, layout, dispatcher, options)
    assert_same_run(ranks[0], single_process(model))
    assert_bitwise_replicas(ranks)


# The batch-level loss is one of a whole micro-batch, so that its size must be the same for every layout.
@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3", L(2, 1, 1, 2, 1)), ("deepseek_8_groups", L(1, 2, 2, 4, 1)), ("deepseek", L(1, 2, 2, 2, 2))],
    ids=str,
)
def test_balance_losses_and_padding(pool, single_process, model, layout) -> None:
    options = {"options": BALANCED, "make_batch": tiny.padded_batch, "samples": 12}
    ranks = pool.run(layout.world, _train, model, layout, "auto", options | {"local_batch": 3})
    expected = single_process(model, **options, local_batch=6)
    assert_same_run(ranks[0], expected)
    assert_bitwise_replicas(ranks)
    assert all(balance > 0 for balance in expected["balance"])


def test_keeping_gathered_parameters_changes_no_number(pool, single_process) -> None:
    ranks = pool.run(4, _train, "deepseek", L(1, 2, 2, 2, 1), "auto", {"reshard_after_forward": False})
    assert_same_run(ranks[0], single_process("deepseek"))


def test_weights_change_the_numbers(single_process) -> None:
    """The comparison can fail: another seed is far outside of the tolerance."""
    other = single_process("qwen3", options=replace(CLIPPED, seed=1))
    assert relative_error(other["loss"], single_process("qwen3")["loss"]) > 1e-4
