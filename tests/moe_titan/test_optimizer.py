"""AdamW over shards of two meshes equals AdamW on whole tensors."""

import math

import numpy as np
import pytest
import tiny
import torch
from layout_runs import full, full_parameters, relative_error
from torch.distributed.tensor import DTensor

from moe_titan.engine import Engine, TrainOptions
from moe_titan.optimizer import NonFiniteGradient
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import local, logical_tensors

LAYOUTS = [
    Layout(),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2, ep=4),
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(tp=4, ep=2, etp=2),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2, ep=4),
]
MODEL = tiny.deepseek(num_experts=8)
FOLDED = Layout(dp_shard=2, tp=2, ep=2)


def set_gradients(engine: Engine, step: int) -> None:
    """A gradient that is a function of the weight, whichever part of it a rank holds; ones for constant weights."""
    for parameter in engine.model.parameters():
        parameter.grad = torch.cos(37.0 * (step + 1) * parameter.detach())


def _steps(layout: Layout, implementation: str, max_norm: float) -> tuple[dict, dict, list[float]]:
    engine = tiny.build(MODEL, layout, TrainOptions(implementation=implementation, weight_decay=0.3))
    before, norms = full_parameters(engine), []
    for step in range(3):
        set_gradients(engine, step)
        norms.append(engine.optimizer.step(1e-2 / (step + 1), max_norm).norm.item())
    return before, full_parameters(engine), norms


@pytest.mark.parametrize("max_norm", [1e3, 0.5])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_equals_adamw_on_whole_tensors(pool, implementation, max_norm) -> None:
    before, after, norms = pool.run(FOLDED.world, _steps, FOLDED, implementation, max_norm)[0]
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in before.items()}
    adam = torch.optim.AdamW(parameters.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, foreach=False)
    for step in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.cos(37.0 * (step + 1) * parameter.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
        assert norms[step] == pytest.approx(norm.item(), rel=1e-6)
        adam.param_groups[0]["lr"] = 1e-2 / (step + 1)
        adam.step()
    for name, parameter in parameters.items():
        assert relative_error(after[name], parameter.detach()) < 1e-6, name


def _constant_norm(layout: Layout, constants: dict[str, float]) -> tuple[float, int, int]:
    engine = tiny.build(MODEL, layout)
    experts = dense = 0
    for name, parameter in engine.model.named_parameters():
        kind = "expert" if ".experts.w" in name else "dense"
        parameter.grad = torch.full_like(parameter, constants[kind])
        experts, dense = experts + parameter.numel() * (kind == "expert"), dense + parameter.numel() * (kind == "dense")
    return engine.optimizer.step(0.0, 1.0).norm.item(), dense, experts


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norm_of_known_gradients(pool, layout) -> None:
    """Every element of the model counts once, whatever is sharded or replicated over whom."""
    for norm, dense, experts in pool.run(layout.world, _constant_norm, layout, {"dense": 2.0, "expert": 3.0}):
        assert experts == 8 * 3 * 16 * 24
        assert norm == pytest.approx(math.sqrt(4 * dense + 9 * experts), rel=1e-6)


def _non_finite(name: str, rank: int, value: float) -> tuple[str, bool]:
    engine = tiny.build(MODEL, FOLDED)
    set_gradients(engine, 0)
    before = full_parameters(engine)
    if torch.distributed.get_rank() == rank:
        local(dict(engine.model.named_parameters())[name].grad).view(-1)[-1] = value
    update = engine.optimizer.step(1e-2, 1.0)
    with pytest.raises(NonFiniteGradient) as raised:
        engine.optimizer.refuse(update)
    moments_clear = not any(local(moment).any() for _, _, moment in engine.optimizer.moments())
    return str(raised.value), moments_clear and all(np.array_equal(v, before[k]) for k, v in full_parameters(engine).items())


@pytest.mark.parametrize(
    ("name", "rank", "value"),
    [
        ("layers.1.moe.experts.w13", 3, math.nan),
        ("layers.0.attention.wq.weight", 1, math.inf),
        ("layers.1.attention_norm.weight", 2, -math.inf),
    ],
)
def test_non_finite_gradient_names_parameter_and_rank(pool, name, rank, value) -> None:
    for message, unchanged in pool.run(FOLDED.world, _non_finite, name, rank, value):
        assert f"{name} on rank {rank} (1 parameters there)" in message
        assert message.count(" on rank ") == 1
        assert unchanged


def _missing_gradient(missing: bool) -> tuple[dict, dict]:
    """Two steps; in the second one some ranks have no gradient of the experts, or one of zeros."""
    engine = tiny.build(MODEL, FOLDED)
    for step in range(2):
        set_gradients(engine, step)
        if step == 1 and torch.distributed.get_rank() % 2:
            for name, parameter in engine.model.named_parameters():
                if ".experts.w" in name:
                    parameter.grad = None if missing else torch.zeros_like(parameter)
        engine.optimizer.step(1e-2, 1.0)
    moments = {
        f"{logical} {moment}": full(part)
        for name, moment, tensor in engine.optimizer.moments()
        for logical, part in logical_tensors(name, tensor)
    }
    return full_parameters(engine), moments


def test_a_missing_gradient_is_one_of_zeros(pool) -> None:
    missing, zeros = (pool.run(FOLDED.world, _missing_gradient, choice)[0] for choice in (True, False))
    for with_none, with_zeros in zip(missing, zeros, strict=True):
        assert with_none.keys() == with_zeros.keys()
        assert all(np.array_equal(with_none[name], with_zeros[name]) for name in with_zeros)


def _state() -> dict:
    engine = tiny.build(MODEL, FOLDED)
    parameters = dict(engine.model.named_parameters())
    out = {"steps": [[step.item() for _, step in engine.optimizer.step_counts()]]}
    set_gradients(engine, 0)
    engine.optimizer.step(1e-2, 1.0)
    out["steps"].append([step.item() for _, step in engine.optimizer.step_counts()])
    out["cleared"] = all(p.grad is None for p in parameters.values())
    out["like"] = all(
        isinstance(tensor, DTensor)
        and (tensor.shape, tensor.placements, tensor.device_mesh)
        == (parameters[name].shape, parameters[name].placements, parameters[name].device_mesh)
        and local(tensor).shape == local(parameters[name]).shape
        for name, _, tensor in engine.optimizer.moments()
    )
    for _, _, tensor in engine.optimizer.moments():
        local(tensor).fill_(5.0)
    out["written"] = all((state["exp_avg"] == 5).all().item() for state in engine.optimizer.state.values())
    out["names"] = sorted({name for name, _, _ in engine.optimizer.moments()}) == sorted(parameters)
    return out


def test_state_can_be_saved_and_loaded(pool) -> None:
    for out in pool.run(FOLDED.world, _state):
        assert set(out["steps"][0]) == {0.0} and set(out["steps"][1]) == {1.0}
        assert out["cleared"] and out["like"] and out["written"] and out["names"]
