"""Low-precision settings that are refused: what the hardware lacks, what excludes what, and keys without effect."""

import re

import pytest
import torch

from float8.hardware import CAPABILITY
from moe_titan.config import ConfigError, load_config, low_precision

MOE = ["--model.name=qwen3", "--model.flavor=debugmodel_moe", "--training.tokenizer=byte"]
GPUS = {"NVIDIA A100": (8, 0), "NVIDIA H200": (9, 0), "NVIDIA B200": (10, 0)}


@pytest.fixture
def gpu(monkeypatch):
    def choose(name: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: GPUS[name])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)

    return choose


def refusal(*flags: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*MOE, *(f"--float8.{flag}" for flag in flags)], world_size)
    return str(caught.value)


@pytest.mark.parametrize("recipe", CAPABILITY)
def test_emulation_runs_everywhere(gpu, recipe) -> None:
    for name in (None, *GPUS):
        gpu(name)
        config = load_config([*MOE, f"--float8.recipe={recipe}", f"--float8.expert_recipe={recipe}", "--float8.emulate"], 1)
        assert config.float8.expert_recipe == recipe


def test_hardware_is_named_with_what_runs_there(gpu) -> None:
    for name, device in ((None, "a CPU"), ("NVIDIA A100", "NVIDIA A100 (compute capability 8.0)")):
        gpu(name)
        for recipe in CAPABILITY:
            problem = refusal(f"recipe={recipe}")
            assert f'float8.recipe = "{recipe}": {device} cannot multiply it; set float8.emulate = true' in problem
    gpu("NVIDIA H200")
    choices = 'use one of "tensorwise", "rowwise", "blockwise", which run there, or set float8.emulate = true'
    for recipe in ("mxfp8", "nvfp4"):
        problem = refusal(f"recipe={recipe}", f"expert_recipe={recipe}")
        device = "NVIDIA H200 (compute capability 9.0) cannot multiply it"
        assert f'float8.recipe = "{recipe}": {device}; {choices}' in problem
        expert_choices = 'use one of "rowwise", "blockwise", which run there, or set float8.emulate = true'
        assert f'float8.expert_recipe = "{recipe}": {device}; {expert_choices}' in problem
    gpu("NVIDIA B200")
    choices = 'use one of "tensorwise", "rowwise", which run there'
    assert f"has no kernels for linears yet; {choices}" in refusal("recipe=blockwise")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA B200"])
def test_what_has_kernels_runs(gpu, name) -> None:
    gpu(name)
    for recipe in ("tensorwise", "rowwise"):
        assert load_config([*MOE, f"--float8.recipe={recipe}"], 1).float8.recipe == recipe


def test_blockwise_linear_layers_have_kernels_on_hopper(gpu) -> None:
    gpu("NVIDIA H200")
    assert load_config([*MOE, "--float8.recipe=blockwise"], 1).float8.recipe == "blockwise"


def test_experts_have_kernels_on_hopper(gpu) -> None:
    for recipe in ("rowwise", "blockwise"):
        gpu("NVIDIA H200")
        assert load_config([*MOE, f"--float8.expert_recipe={recipe}"], 1).float8.expert_recipe == recipe
        gpu("NVIDIA B200")
        assert "has no kernels for experts yet; set float8.emulate = true" in refusal(f"expert_recipe={recipe}")


def test_kernels_compute_in_bf16(gpu) -> None:
    gpu("NVIDIA H200")
    with pytest.raises(ConfigError, match='mixed_precision_param = "float32": must be "bfloat16" with float8.recipe = "rowwise"'):
        load_config([*MOE, "--float8.recipe=rowwise", "--training.mixed_precision_param=float32"], 1)


def test_kernels_take_whole_tiles_of_tokens(gpu) -> None:
    gpu("NVIDIA H200")
    argv = [*MOE, "--float8.recipe=rowwise", "--training.local_batch_size=2"]
    with pytest.raises(ConfigError, match="seq_len = 100: times local_batch_size gives 200 tokens, .* multiple of 16"):
        load_config([*argv, "--training.seq_len=100"], 1)
    for extra in (["--training.seq_len=104"], ["--training.seq_len=100", "--float8.emulate=true"]):
        load_config([*argv, *extra], 1)


def test_transformer_engine(gpu, monkeypatch) -> None:
    gpu("NVIDIA H200")
    problem = refusal("recipe=blockwise", "backend=te")
    assert 'float8.backend = "te": the package transformer_engine is not installed; install it' in problem
    monkeypatch.setattr(low_precision, "find_spec", lambda name: name)
    for recipe in ("tensorwise", "blockwise"):
        flags = [f"--float8.recipe={recipe}", f"--float8.expert_recipe={recipe}", "--float8.backend=te"]
        assert load_config([*MOE, *flags], 1).float8.backend == "te"
    problem = refusal("recipe=rowwise", "expert_recipe=mxfp8", "backend=te", "all_gather", "expert_weight_grad_bf16")
    which = 'use one of "tensorwise", "blockwise", which run there'
    assert f'float8.recipe = "rowwise": Transformer Engine has no such recipe; {which}' in problem
    assert f"(compute capability 9.0) cannot multiply it; {which}" in problem
    for key in ("all_gather", "expert_weight_grad_bf16"):
        assert f'float8.{key} = true: must be false with float8.backend = "te"' in problem
    for flag, refused in (("expert_recipe=blockwise", True), ("recipe=blockwise", False)):
        argv = [*MOE, "--float8.backend=te", f"--float8.{flag}", "--moe.stash_factor=1.5", "--activation_checkpoint.mode=none"]
        if refused:
            with pytest.raises(ConfigError, match='moe.stash_factor = 1.5: must be none: with float8.backend = "te"'):
                load_config(argv, 1)
        else:
            load_config(argv, 1)
    with pytest.raises(ConfigError, match='must be "bfloat16" with float8.recipe = "tensorwise"'):
        load_config([*MOE, "--float8.recipe=tensorwise", "--float8.backend=te", "--training.mixed_precision_param=float32"], 1)
    gpu("NVIDIA B200")
    load_config([*MOE, "--float8.expert_recipe=nvfp4", "--float8.backend=te"], 1)


def test_what_fsdp_can_gather_in_fp8(gpu) -> None:
    gpu("NVIDIA H200")
    gather = "all_gather"
    for flags, ranks in (
        (["recipe=rowwise", "expert_recipe=rowwise"], []),
        (["expert_recipe=blockwise"], ["--parallelism.expert_parallel_degree=4"]),
        (["recipe=tensorwise"], ["--parallelism.data_parallel_shard_degree=1", "--parallelism.data_parallel_replicate_degree=4"]),
    ):
        argv = [*MOE, *(f"--float8.{flag}" for flag in flags), f"--float8.{gather}", *ranks]
        with pytest.raises(ConfigError, match='float8.all_gather = true: needs float8.recipe = "tensorwise" and'):
            load_config(argv, 4)
    for flags, ranks in (
        (["recipe=tensorwise"], []),
        (["recipe=rowwise", "expert_recipe=blockwise"], ["--parallelism.expert_parallel_degree=2"]),
    ):
        assert load_config([*MOE, *(f"--float8.{flag}" for flag in flags), f"--float8.{gather}", *ranks], 4).float8.all_gather
    assert "needs float8.emulate = false" in refusal("recipe=tensorwise", gather, "emulate", world_size=4)


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["recipe=fp8"], 'float8.recipe = "fp8": must be one of "none", "tensorwise"'),
        (["emulate"], "float8.emulate = true: needs float8.recipe or float8.expert_recipe"),
        (["backend=te"], 'float8.backend = "te": needs float8.recipe or float8.expert_recipe'),
        (["filter_fqns=wq"], 'float8.filter_fqns = ["wq"]: needs float8.recipe or float8.expert_recipe'),
        (["first_layers_bf16=1"], "float8.first_layers_bf16 = 1: needs float8.recipe or float8.expert_recipe"),
        (["emulate", "recipe=mxfp8", "expert_weight_grad_bf16"], "expert_weight_grad_bf16 = true: needs float8.expert_recipe"),
        (["emulate", "recipe=mxfp8", "last_layers_bf16=-1"], "float8.last_layers_bf16 = -1: must be >= 0"),
    ],
)
def test_settings_without_effect(flags, fragment) -> None:
    assert fragment in refusal(*flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["expert_recipe=mxfp8", "emulate"], 'needs float8.expert_recipe one of "rowwise", "blockwise", whose weights it keeps'),
        (["expert_recipe=rowwise", "emulate"], "needs float8.emulate = false"),
        ([], "needs float8.recipe or float8.expert_recipe"),
    ],
)
def test_weights_that_cannot_be_kept(flags, message) -> None:
    assert f"float8.keep_weights = true: {message}" in refusal("keep_weights", *flags)


@pytest.mark.parametrize(
    ("recipe", "mode", "option", "message"),
    [
        ("mxfp8", "none", "op", 'needs float8.expert_recipe one of "rowwise", "blockwise", whose operands it saves'),
        ("rowwise", "selective", "op", 'has no effect with activation_checkpoint.mode = "selective"'),
        ("rowwise", "selective", "1", 'has no effect with activation_checkpoint.mode = "selective"'),
        ("blockwise", "full", "2", 'has no effect with activation_checkpoint.mode = "full"'),
    ],
)
def test_activations_that_are_not_saved(recipe, mode, option, message) -> None:
    flags = "emulate", "save_activations", f"expert_recipe={recipe}"
    argv = [*MOE, f"--activation_checkpoint.selective_ac_option={option}", *(f"--float8.{flag}" for flag in flags)]
    with pytest.raises(ConfigError, match=re.escape(f"float8.save_activations = true: {message}")):
        load_config([*argv, f"--activation_checkpoint.mode={mode}"], 1)
    every_other = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
    argv = [*MOE, "--float8.emulate", "--float8.save_activations", "--float8.expert_recipe=rowwise", *every_other]
    assert load_config(argv, 1).float8.save_activations


def test_a_head_without_kernels(gpu) -> None:
    gpu("NVIDIA H200")
    for flags in (["recipe=tensorwise"], ["expert_recipe=rowwise"]):
        problem = refusal("head", *flags)
        assert (
            'float8.head = true: needs float8.recipe one of "rowwise", "blockwise", for which there are kernels, not' in problem
        )
    assert "float8.head = true: needs float8.recipe or float8.expert_recipe" in refusal("head")
    for flags in (["recipe=rowwise"], ["recipe=blockwise"], ["recipe=nvfp4", "emulate"]):
        assert load_config([*MOE, "--float8.head", *(f"--float8.{flag}" for flag in flags)], 1).float8.head


def test_weights_of_fsdp_are_not_kept() -> None:
    with pytest.raises(ConfigError, match="needs experts on as many ranks as hold a replica"):
        load_config([*MOE, "--float8.expert_recipe=rowwise", "--float8.keep_weights"], 2)


def test_dispatch_that_sends_no_operand() -> None:
    on_2, flags = "--parallelism.expert_parallel_degree=2", ["emulate", "dispatch"]

    def refusal_on_2(*flags: str, dispatcher: str = "auto") -> str:
        with pytest.raises(ConfigError) as caught:
            argv = [*MOE, on_2, f"--moe.dispatcher={dispatcher}", *(f"--float8.{flag}" for flag in flags)]
            load_config(argv, 2)
        return str(caught.value)

    for recipe in ("tensorwise", "mxfp8", "nvfp4"):
        message = 'float8.dispatch = true: needs float8.expert_recipe one of "rowwise", "blockwise"'
        assert f'{message}, whose operands it sends, not "{recipe}"' in refusal_on_2(*flags, f"expert_recipe={recipe}")
    assert 'not "none"' in refusal_on_2(*flags, "recipe=mxfp8")
    for kind in ("allgather", "deepep"):
        message = f'needs moe.dispatcher one of "auto", "alltoall", "nvlink", not "{kind}"'
        assert message in refusal_on_2(*flags, "expert_recipe=rowwise", dispatcher=kind)
    assert "float8.dispatch = true: needs parallelism.expert_parallel_degree" in refusal(*flags, "expert_recipe=blockwise")
    assert "float8.dispatch = true: needs float8.recipe or float8.expert_recipe" in refusal_on_2("dispatch")
    for kind in ("auto", "alltoall", "nvlink"):
        argv = [*MOE, on_2, f"--moe.dispatcher={kind}", "--float8.expert_recipe=blockwise", "--float8.emulate"]
        assert load_config([*argv, "--float8.dispatch"], 2).float8.dispatch
