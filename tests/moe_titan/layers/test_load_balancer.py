"""Expert bias: applied once per step, by the sign of the load, and by nobody else."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from layout_runs import CLIPPED, biases, train
from torch import nn
from torchtitan.models.moe.moe import MoEArgs

from moe_titan.layers.load_balancer import LoadBalancer
from moe_titan.layers.moe import MoE
from parallelisms.folded_mesh import Layout
from parallelisms.routing import PairOrder, Routing, RoutingTape

E = 4


def layers(*coeffs: float | None) -> nn.ModuleList:
    args = MoEArgs(num_experts=E, top_k=2)
    return nn.ModuleList(MoE(replace(args, load_balance_coeff=c), 8, 8, f"layers.{i}") for i, c in enumerate(coeffs))


def tape(**counts: list[int]) -> RoutingTape:
    nothing = torch.zeros(0, 2)
    orders = {name: PairOrder(nothing, nothing, torch.tensor(count), nothing) for name, count in counts.items()}
    return RoutingTape(layers={f"layers.{name[1:]}": Routing(nothing.long(), nothing, order) for name, order in orders.items()})


def test_sign_rule() -> None:
    model = layers(0.1)
    balancer = LoadBalancer(model, None)
    balancer.add(tape(L0=[10, 2, 2, 2]))
    assert balancer.step()["layers.0"].tolist() == [10, 2, 2, 2]
    # -1 for the overloaded expert, +1 for the others, less their mean of 1/2; by how much they differ does not count.
    assert model[0].expert_bias.tolist() == pytest.approx([-0.15, 0.05, 0.05, 0.05])
    balancer.add(tape(L0=[1000, 0, 0, 0]))
    balancer.step()
    assert model[0].expert_bias.tolist() == pytest.approx([-0.3, 0.1, 0.1, 0.1])


def test_equal_load_changes_nothing() -> None:
    model = layers(0.1)
    balancer = LoadBalancer(model, None)
    balancer.add(tape(L0=[5, 5, 5, 5]))
    balancer.step()
    assert not model[0].expert_bias.any()


def test_counts_of_micro_batches_add_up_and_are_forgotten() -> None:
    model = layers(0.1)
    balancer = LoadBalancer(model, None)
    for counts in ([4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0], [0, 0, 0, 4]):
        balancer.add(tape(L0=counts))
    assert balancer.step()["layers.0"].tolist() == [4, 4, 4, 4]
    assert not model[0].expert_bias.any()
    balancer.add(tape(L0=[1, 0, 0, 0]))
    assert balancer.step()["layers.0"].tolist() == [1, 0, 0, 0]


def test_counts_beyond_fp32_keep_their_sign() -> None:
    model = layers(0.1)
    balancer = LoadBalancer(model, None)
    balancer.add(tape(L0=[2**30 + 1, 2**30 - 1, 2**30 + 1, 2**30 - 1]))
    balancer.step()
    assert model[0].expert_bias.tolist() == pytest.approx([-0.1, 0.1, -0.1, 0.1])


def test_layers_without_balancing_are_counted_and_stop_nobody() -> None:
    model = layers(None, 0.1, None, 0.2)
    assert [name for name, _ in model.named_buffers()] == ["1.expert_bias", "3.expert_bias"]
    balancer = LoadBalancer(model, None)
    balancer.add(tape(L0=[4, 0, 0, 0], L1=[4, 0, 0, 0], L2=[0, 4, 0, 0], L3=[0, 0, 0, 4]))
    loads = balancer.step()
    assert [load.tolist() for load in loads.values()] == [[4, 0, 0, 0], [4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 4]]
    assert model[0].expert_bias is None and model[2].expert_bias is None
    assert model[1].expert_bias.tolist() == pytest.approx([-0.15, 0.05, 0.05, 0.05])
    assert model[3].expert_bias.tolist() == pytest.approx([0.1, 0.1, 0.1, -0.3])


def test_a_model_without_moe_layers() -> None:
    assert LoadBalancer(nn.Linear(2, 2), None).step() == {}


def _run(local_batch: int, parallel: dict) -> dict:
    return train(tiny.deepseek(), Layout(), CLIPPED, 3, 12, local_batch, **parallel)


@pytest.fixture(scope="module")
def one_batch(pool) -> dict:
    return pool.run(1, _run, 12, {})[0]


@pytest.mark.parametrize("parallel", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_accumulation_and_recomputation_count_once(pool, one_batch, parallel) -> None:
    run = pool.run(1, _run, 3, parallel)[0]
    assert run["load"] == one_batch["load"]
    assert all(sum(load) == 2 * 12 * tiny.SEQ for load in run["load"][0].values())
    for name, bias in one_batch["bias"].items():
        assert np.array_equal(run["bias"][name], bias) and bias.any()


def _evaluate_only() -> tuple[dict, dict, dict]:
    engine = tiny.build(tiny.deepseek(), Layout())
    before = biases(engine)
    batch = tiny.share(tiny.global_batch(0, 3), 0, 1, 1)
    engine.evaluate(batch)
    engine.model.train()
    engine.evaluate(batch)
    return before, biases(engine), {layer: c.tolist() for layer, c in engine.balancer._counts.items()}


def test_evaluation_counts_nothing(pool) -> None:
    before, after, counts = pool.run(1, _evaluate_only)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before) and counts == {}
