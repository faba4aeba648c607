"""Which modules get a recipe, and what is said when none does."""

from dataclasses import replace

import pytest
import tiny
import torch
from layout_runs import relative_error
from torch import nn
from torchtitan.models.llama3.model.args import TransformerModelArgs

from float8.convert import Float8Options, convert
from float8.emulation import EmulatedLinear
from kernels.expert_mlp import HIGH_PRECISION
from moe_titan.models import build_model
from parallelisms.tensor_parallel import weight_parts

BOTH = Float8Options("mxfp8", "tensorwise", emulate=True)
ATTENTION = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
SHARED = ["moe.shared_experts.w1", "moe.shared_experts.w2", "moe.shared_experts.w3"]


def qwen3(**moe) -> nn.Module:
    name, args = tiny.qwen3(**moe)
    return build_model(name, replace(args, dim=64, head_dim=16, moe_inter_dim=32))


def deepseek() -> nn.Module:
    name, args = tiny.deepseek()
    vars(args).update(dim=32, inter_dim=64, moe_inter_dim=32, qk_nope_head_dim=12, v_head_dim=20)
    return build_model(name, args)


def layers(*names: str, layers: tuple[int, ...] = (0, 1)) -> set[str]:
    return {f"layers.{layer}.{name}" for layer in layers for name in names}


def test_all_that_may_be_converted_is() -> None:
    model = qwen3(num_shared_experts=1)
    parameters = dict(model.named_parameters())
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    result = convert(model, BOTH)
    assert {name for name, what in result.converted.items() if what == "mxfp8, emulated"} == layers(*ATTENTION, *SHARED)
    assert {name for name, what in result.converted.items() if what == "tensorwise, emulated"} == layers("moe.experts")
    assert not result.left
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, EmulatedLinear) == (name in result.converted)
        if name.endswith("moe.experts"):
            assert module.products is not HIGH_PRECISION
    assert plain - result.converted.keys() == layers("moe.router.gate")
    after = dict(model.named_parameters())
    assert [*after] == [*parameters] and all(after[name] is parameters[name] for name in after)


def test_what_tiles_do_not_fit_is_left() -> None:
    model = deepseek()  # latent width 12 + 4, and 8 heads of 12 + 4, 12 + 20 and 20
    result = convert(model, replace(BOTH, expert_recipe="none"))
    assert {name.removeprefix("layers.1."): why for name, why in result.left.items() if "layers.1" in name} == {
        "attention.wkv_a": "16 not a multiple of 32",
        "attention.wkv_b": "12 not a multiple of 32",
    }
    assert layers("attention.wq", "attention.wo", *SHARED, layers=(1,)) <= result.converted.keys()
    assert result.converted.keys() & layers("feed_forward.w1", "moe.experts") == layers("feed_forward.w1", layers=(0,))
    assert "layers.1.attention.wkv_b: left, 12 not a multiple of 32\n" in result.table()
    assert "layers.*.attention.wkv_b: left, 12 not a multiple of 32 (2)" in result.summary().splitlines()
    assert "layers.*.attention.wq: mxfp8, emulated (2)" in result.summary().splitlines()


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_the_head_is_converted_if_asked(recipe, emulate) -> None:
    model = build_model("qwen3", replace(tiny.qwen3()[1], vocab_size=96, dim=128, head_dim=32))
    options = Float8Options(recipe, head=True, emulate=emulate)
    result = convert(model, options, parts=weight_parts(model, 2))
    what = "rowwise, logits and gradients" + emulate * ", emulated"
    assert result.converted["output"] == what and f"output: {what}\n" in result.table()
    weight_VD, h_TD = torch.randn(96, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    logits_TV = model.output.products(weight_VD).logits(h_TD)
    assert 1e-2 < relative_error(logits_TV.float().numpy(), (h_TD @ weight_VD.t()).float().numpy()) < 5e-2
    with pytest.raises(ValueError, match="float8.head = true: of the weight's sizes 24 not a multiple of 16.*over fewer ranks"):
        convert(model, options, parts=weight_parts(model, 4))


def test_expert_width_is_that_of_a_rank() -> None:
    experts = Float8Options(expert_recipe="mxfp8", emulate=True)
    assert convert(qwen3(), experts, 1).converted.keys() == layers("moe.experts")
    with pytest.raises(ValueError, match="no expert layer .2 left: 16 not a multiple of 32"):
        convert(qwen3(), experts, 2)


def test_sizes_of_linear_layers_are_those_of_a_rank() -> None:
    model = qwen3(num_shared_experts=1)
    parts = weight_parts(model, 4)
    assert parts["layers.0.attention.wq"] == (4, 1) and parts["layers.1.moe.shared_experts.w2"] == (1, 4)
    result = convert(model, Float8Options("mxfp8", emulate=True), parts=parts)  # eight heads of 16, shared experts 32 wide
    assert result.converted.keys() == layers(*ATTENTION)
    assert result.left["layers.0.moe.shared_experts.w2"] == "8 not a multiple of 32"
    latents = weight_parts(deepseek(), 2)
    assert latents["layers.0.attention.wkv_a"] == (1, 1) and latents["layers.0.attention.wkv_b"] == (2, 1)


def test_exemptions() -> None:
    result = convert(qwen3(), replace(BOTH, filter_fqns=["attention.wk", "0.moe"]))
    expected = layers("attention.wq", "attention.wv", "attention.wo") | layers("moe.experts", layers=(1,))
    assert result.converted.keys() == expected
    assert result.left["layers.0.moe.experts"] == 'contains "0.moe"'
    for options, left in (({"first_layers_bf16": 1}, 0), ({"last_layers_bf16": 1}, 1)):
        result = convert(qwen3(), replace(BOTH, **options))
        assert result.converted.keys() == layers(*ATTENTION, "moe.experts", layers=(1 - left,))
        assert result.left.keys() == layers(*ATTENTION, "moe.experts", layers=(left,))


DENSE = build_model("llama3", TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=40))


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"recipe": "blockwise"}, ['float8.recipe = "blockwise" converts no linear layer', "64 not a multiple of 128"]),
        ({"first_layers_bf16": 2}, ['float8.recipe = "mxfp8" converts no linear layer (8 left: one of the first 2 layers)']),
        ({"filter_fqns": ["moe"]}, ['float8.expert_recipe = "tensorwise" converts no expert layer', 'contains "moe"']),
        ({"filter_fqns": ["wq", "mlp"]}, ['"mlp" is part of no name', "layers.*.attention.wk", "layers.*.moe.experts"]),
        ({"recipe": "none", "filter_fqns": ["wq"]}, ['"wq" is part of no name', "convert: layers.*.moe.experts"]),
    ],
)
def test_nothing_to_convert_is_an_error(options, fragments) -> None:
    with pytest.raises(ValueError) as caught:
        convert(qwen3(), replace(BOTH, **options))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_the_head_alone_may_be_converted() -> None:
    options = replace(BOTH, recipe="rowwise", expert_recipe="none", emulate=True, filter_fqns=["attention"], head=True)
    result = convert(build_model("qwen3", replace(tiny.qwen3()[1], dim=64, vocab_size=96)), options)
    assert result.converted.keys() == {"output"} and result.left.keys() == layers(*ATTENTION)


def test_a_model_without_experts_has_none_to_convert() -> None:
    with pytest.raises(ValueError, match="converts no expert layer .the model has none"):
        convert(DENSE, replace(BOTH, recipe="none"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kernels_are_those_of_torchao(recipe) -> None:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    model = qwen3()
    weight = model.layers["0"].attention.wq.weight
    assert set(convert(model, Float8Options(recipe)).converted.values()) == {recipe}
    layer = model.layers["0"].attention.wq
    assert isinstance(layer, Float8Linear) and layer.weight is weight
    assert layer.config == Float8LinearConfig.from_recipe_name(recipe) and not layer.config.emulate


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_kernels_on_hopper_are_those_of_experts(monkeypatch, recipe) -> None:
    monkeypatch.setattr("float8.convert.capability", lambda: (9, 0))
    model = build_model("qwen3", replace(tiny.qwen3()[1], dim=128, head_dim=32))
    convert(model, Float8Options(recipe))
    assert model.layers["0"].attention.wo.blockwise == (recipe == "blockwise")


def test_a_bias_is_left() -> None:
    model = qwen3()
    model.layers["1"].attention.wq = nn.Linear(64, 128, device=torch.device("meta"))
    assert convert(model, BOTH).left == {"layers.1.attention.wq": "has a bias"}
