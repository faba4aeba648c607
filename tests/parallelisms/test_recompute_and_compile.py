"""Recomputation and compilation are ways of doing the same work: gradients equal those of eager execution."""

import pytest
import tiny
import torch
from layout_runs import CLIPPED, assert_same_run, full_gradients, relative_error, train_counting_graphs

from moe_titan.layers.moe import MoE
from moe_titan.optimizer import Update
from parallelisms.folded_mesh import Layout

# deepseek_v3 has a dense block and one with routed and shared experts.
MODELS = {"qwen3": tiny.qwen3(), "deepseek": tiny.deepseek(), "flex": tiny.deepseek()}
MODELS["flex"][1].attn_type, MODELS["flex"][1].attn_mask_type = "flex", "block_causal"
FULL = {"recompute": "full"}
BY_OPERATION = {"recompute": "selective"}
EVERY_SECOND = {"recompute": "selective", "recompute_option": "2"}
COMPILED = {"compile_backend": "aot_eager"}
FOLDED = Layout(tp=2, ep=2)
CASES = [
    ("deepseek", Layout(), FULL),
    ("deepseek", Layout(), BY_OPERATION),
    ("deepseek", Layout(), EVERY_SECOND),
    ("deepseek", Layout(), COMPILED),
    ("deepseek", Layout(), COMPILED | FULL),
    ("deepseek", Layout(), COMPILED | BY_OPERATION),
    ("deepseek", Layout(), COMPILED | EVERY_SECOND),
    ("qwen3", Layout(), COMPILED | FULL),
    ("deepseek", FOLDED, FULL),
    ("deepseek", FOLDED, BY_OPERATION),
    ("deepseek", FOLDED, EVERY_SECOND),
    ("deepseek", FOLDED, COMPILED),
    ("deepseek", FOLDED, COMPILED | FULL),
    ("deepseek", FOLDED, COMPILED | BY_OPERATION),
    ("qwen3", FOLDED, COMPILED | BY_OPERATION),
    ("flex", Layout(), COMPILED),
    ("flex", Layout(), COMPILED | FULL),
    ("flex", FOLDED, BY_OPERATION),
    ("flex", FOLDED, COMPILED | BY_OPERATION),
]


def _train(model: str, layout: Layout, parallel: dict) -> dict:
    return train_counting_graphs(MODELS[model], layout, CLIPPED, steps=5, **parallel)


@pytest.fixture(scope="module")
def eager(pool):
    cache: dict[str, dict] = {}

    def run(model: str, layout: Layout) -> dict:
        key = f"{model} {layout}"
        if key not in cache:
            cache[key] = pool.run(layout.world, _train, model, layout, {})[0]
        return cache[key]

    return run


@pytest.mark.parametrize(
    ("model", "layout", "parallel"), CASES, ids=lambda v: f"tp{v.tp}ep{v.ep}" if isinstance(v, Layout) else str(v)
)
def test_same_numbers_as_eager_without_recompilation(pool, eager, model, layout, parallel) -> None:
    run = pool.run(layout.world, _train, model, layout, parallel)[0]
    assert (run["graphs"] > 0) == ("compile_backend" in parallel)
    loads = {tuple(load) for step in run["load"] for load in step.values()}
    assert len(loads) == 5 * len(run["load"][0])
    assert_same_run(run, eager(model, layout), 1e-6)


def _gradients_under_another_bias(parallel: dict, perturb: bool) -> tuple[dict, dict]:
    """Gradients and load of a step between whose forward and backward pass the expert bias changes."""
    engine = tiny.build(MODELS["deepseek"], FOLDED, **parallel)
    grads = {}

    def change_bias(*_) -> None:
        for module in engine.model.modules():
            if isinstance(module, MoE):
                module.expert_bias.copy_(torch.linspace(5, -5, len(module.expert_bias)))

    if perturb:
        engine.model.register_forward_hook(change_bias)
    engine.optimizer.step = lambda lr, max_norm: grads.update(full_gradients(engine)) or Update(torch.ones(()), {}, 1)
    result = engine.step([tiny.padded_batch(0, 3)], lr=1e-3)
    return grads, {layer: load.tolist() for layer, load in result.expert_load.items()}


@pytest.mark.parametrize("parallel", [FULL, EVERY_SECOND | {"recompute_option": "1"}, COMPILED | FULL], ids=str)
def test_routing_is_not_recomputed(pool, parallel) -> None:
    """Were it, the bias set between forward and backward would send the recomputed tokens to other experts."""
    expected, load = pool.run(2, _gradients_under_another_bias, {}, False)[0]
    grads, perturbed_load = pool.run(2, _gradients_under_another_bias, parallel, True)[0]
    assert perturbed_load == load
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative_error(grads[name], grad) < 1e-6, name


def _kept_pre_activations(parallel: dict) -> int:
    """How many tensors of the shape of the experts' gate/up pre-activations a step's forward pass keeps."""
    engine, kept = tiny.build(MODELS["deepseek"], Layout(), **parallel), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 3 and tensor.shape[1:] == (2, engine.args.moe_inter_dim):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.step([tiny.global_batch(0, 3)], lr=1e-3)
    return len(kept)


def test_experts_make_their_pre_activations_again(pool) -> None:
    assert [pool.run(1, _kept_pre_activations, parallel)[0] for parallel in ({}, BY_OPERATION)] == [1, 0]


def _recomputed_calls(parallel: dict) -> dict[str, int]:
    """How often attention and MoE layers ran in one step of one micro-batch."""
    engine = tiny.build(MODELS["deepseek"], Layout(), **parallel)
    calls = {"attention": 0, "moe": 0, "routed": 0}

    def counting(key):
        def hook(*_):
            calls[key] += 1

        return hook

    for block in engine.model.layers.values():
        block.attention.wo.register_forward_pre_hook(counting("attention"))
        if block.moe_enabled:
            block.moe.register_forward_pre_hook(counting("moe"))
            block.moe.experts.register_forward_pre_hook(counting("routed"))
    engine.step([tiny.global_batch(0, 3)], lr=1e-3)
    return calls


@pytest.mark.parametrize(
    ("parallel", "attention", "moe"), [({}, 2, 1), (FULL, 4, 2), (EVERY_SECOND, 3, 1), (BY_OPERATION, 4, 1)], ids=str
)
def test_what_is_recomputed(pool, parallel, attention, moe) -> None:
    """Two blocks, the second with experts; every second one is the first."""
    assert pool.run(1, _recomputed_calls, parallel)[0] == {"attention": attention, "moe": moe, "routed": moe}
