"""Transformer Engine as a backend, by a stand-in that computes in bf16: what it is given, and that results are those of ours."""

import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import fake_transformer_engine
import float8_rows
import numpy as np
import pytest
import tiny
import torch
from layout_runs import CLIPPED, relative_error, train
from torch.nn import functional as F

from float8.convert import Float8Options, convert
from float8.transformer_engine import RECIPES, TransformerEngineExperts
from kernels.expert_mlp import expert_mlp
from moe_titan.models import build_model
from parallelisms.folded_mesh import Layout

BOTH = Float8Options("tensorwise", "mxfp8", backend="te")


@pytest.fixture
def engine():
    with patch.dict(sys.modules, fake_transformer_engine.modules()):
        fake_transformer_engine.calls.clear()
        yield fake_transformer_engine


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts(engine, recipe, recompute) -> None:
    torch.manual_seed(0)
    groups = [1, 0, 7, 127, 129, 0]
    values, index, grad_RD = float8_rows.inputs(64, 32, groups, "cpu")
    grad_RD[sum(groups) :] = 0
    results = []
    for mlp in (TransformerEngineExperts(recipe), expert_mlp):
        leaves = [value.clone().requires_grad_() for value in values]
        out_RD = mlp(*leaves, *index, recompute)
        out_RD.backward(grad_RD)
        results.append([out_RD[: sum(groups)].detach(), *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert (actual.double() - expected.double()).norm() < 1e-2 * expected.double().norm()
    assert not results[0][2][1].any()  # an expert without tokens
    assert {call[:2] for call in engine.calls} == {("GroupedLinear", RECIPES[recipe])}
    assert len(engine.calls) == 2 * (1 + recompute)
    assert all(sizes == [128, 0, 128, 128, 256, 0] for _, _, sizes in engine.calls)


def test_no_token(engine) -> None:
    values, index, _ = float8_rows.inputs(64, 32, [0, 0], "cpu")
    leaves = [value.requires_grad_() for value in values]
    out_RD = TransformerEngineExperts("mxfp8")(*leaves, *index, False)
    out_RD.sum().backward()
    assert out_RD.shape == (5, 64) and not out_RD.any() and not leaves[1].grad.any()


def test_linear_layers_keep_their_parameters(engine) -> None:
    name, args = tiny.qwen3(num_shared_experts=1)
    model = build_model(name, replace(args, dim=64, head_dim=16, moe_inter_dim=32)).bfloat16()
    before, state = [name for name, _ in model.named_parameters()], [*model.state_dict()]
    result = convert(model, BOTH)
    assert result.converted["layers.0.attention.wq"] == "tensorwise, Transformer Engine"
    assert result.converted["layers.1.moe.experts"] == "mxfp8, Transformer Engine"
    layer = model.get_submodule("layers.0.attention.wq").to_empty(device="cpu")
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(4, 8, 64).bfloat16().requires_grad_()
    assert torch.equal(layer(x), F.linear(x, layer.weight)) and engine.calls == [("Linear", "Float8CurrentScaling", None)]
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert [name for name, _ in model.named_parameters()] == before and [*model.state_dict()] == state


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [(Layout(dp_shard=2, ep=2), "none"), (Layout(tp=2), "none"), (Layout(dp_shard=2), "full")],
    ids=["experts_spread", "tensor_parallel", "recomputed"],
)
def test_training(pool, layout, recompute) -> None:
    """The stand-in computes in bf16, so that the run is that without it."""
    name, args = tiny.qwen3(num_shared_experts=1)
    model = name, replace(args, dim=64, head_dim=16, moe_inter_dim=32)
    actual, expected = (pool.run(layout.world, _train, model, layout, on, recompute)[0] for on in (True, False))
    assert np.allclose(actual["loss"], expected["loss"], rtol=1e-3)
    errors = [relative_error(grad, expected["grads"][0][name]) for name, grad in actual["grads"][0].items()]
    assert np.median(errors) < 1e-2


def _train(model, layout, on: bool, recompute: str) -> dict:
    fake_transformer_engine.install()
    options = replace(CLIPPED, float8=BOTH) if on else CLIPPED
    batch = partial(tiny.global_batch, seq=16)  # Transformer Engine multiplies multiples of 16 tokens
    sizes = {"samples": 4, "local_batch": 2, "make_batch": batch}
    run = train(model, layout, options, **sizes, recompute=recompute, param_dtype=torch.bfloat16)
    assert {kind for kind, _, _ in fake_transformer_engine.calls} == ({"Linear", "GroupedLinear"} if on else set())
    fake_transformer_engine.calls.clear()
    return run
