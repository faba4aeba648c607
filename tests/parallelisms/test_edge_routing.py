"""Routing at its extremes: the same numbers on every layout, no hang, no NaN."""

from functools import partial

import numpy as np
import pytest
import tiny
import torch
from layout_runs import CLIPPED, assert_bitwise_replicas, assert_same_run, train
from reference import train_reference

from moe_titan.data import IGNORED, MicroBatch
from moe_titan.layers.moe import MoE
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import local

EXPERTS = 8


def force_bias(values: dict[int, float], engine) -> None:
    for module in engine.model.modules():
        if isinstance(module, MoE):
            for expert, value in values.items():
                module.expert_bias[expert] = value


@torch.no_grad()
def zero_gate(engine) -> None:
    for module in engine.model.modules():
        if isinstance(module, MoE):
            local(module.router.gate.weight).zero_()


def one_valid_token(step: int, samples: int) -> MicroBatch:
    """A single trained token, elsewhere in each step; the rest is padding."""
    tokens, labels, _ = tiny.global_batch(step, samples)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    valid[(step * 5) % samples, (step * 7) % tokens.shape[1]] = True
    return MicroBatch(tokens, torch.where(valid, tokens, IGNORED), valid)


# name: top_k, change of the model, batches, and what the first step's load must look like.
SCENARIOS = {
    "no_tokens_for_one_expert": (2, partial(force_bias, {3: -10.0}), tiny.global_batch, lambda load: load[3] == 0),
    "no_tokens_for_half_of_the_experts": (
        2,
        partial(force_bias, {e: -10.0 for e in range(4, 8)}),
        tiny.global_batch,
        lambda load: not any(load[4:]),
    ),
    "all_tokens_to_one_expert": (1, partial(force_bias, {5: 10.0}), tiny.global_batch, lambda load: load[5] == sum(load)),
    "one_valid_token": (2, None, one_valid_token, lambda load: sum(load) == 2 and max(load) == 1),
    "ties_in_every_score": (2, zero_gate, tiny.global_batch, lambda load: load[0] == load[1] == sum(load) / 2),
}
# dp_replicate, dp_shard, tp, ep, etp, the dispatcher, and the ranks of a domain.
LAYOUTS = [
    ((1, 2, 2, 4, 1), "alltoall", None),
    ((1, 1, 2, 1, 2), "alltoall", None),
    ((1, 1, 2, 2, 1), "allgather", None),
    ((2, 1, 2, 2, 2), "alltoall", None),
    ((1, 4, 1, 4, 1), "alltoall", 2),
]


def model(top_k: int):
    # Without normalisation the router has a gradient even for top-1.
    return tiny.deepseek(num_experts=EXPERTS, top_k=top_k, route_norm=False)


def _train(scenario: str, layout: Layout, dispatcher: str, domain: int | None) -> dict:
    top_k, tweak, make_batch, _ = SCENARIOS[scenario]
    batch = 12 // layout.dp
    options = {"dispatcher": dispatcher, "dispatch_domain": domain}
    return train(model(top_k), layout, CLIPPED, 2, 12, batch, make_batch, tweak=tweak, **options)


@pytest.fixture(scope="module")
def single_process(pool):
    cache: dict[str, dict] = {}

    def run(scenario: str) -> dict:
        if scenario not in cache:
            cache[scenario] = pool.run(1, _train, scenario, Layout(), "local", None)[0]
        return cache[scenario]

    return run


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_single_process_equals_reference(single_process, scenario) -> None:
    top_k, _, make_batch, expected_load = SCENARIOS[scenario]
    run = single_process(scenario)
    assert all(expected_load(load) for load in run["load"][0].values()), run["load"][0]
    batches = [[make_batch(step, 12)] for step in range(2)]
    assert_same_run(run, train_reference(model(top_k), run["initial"], run["initial_bias"], batches, CLIPPED))
    assert all(np.isfinite(value).all() for value in run["params"].values())


@pytest.mark.parametrize(("degrees", "dispatcher", "domain"), LAYOUTS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_layouts_agree(pool, single_process, scenario, degrees, dispatcher, domain) -> None:
    dp_replicate, dp_shard, tp, ep, etp = degrees
    layout = Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep, etp=etp)
    ranks = pool.run(layout.world, _train, scenario, layout, dispatcher, domain)
    assert_same_run(ranks[0], single_process(scenario))
    assert_bitwise_replicas(ranks)
