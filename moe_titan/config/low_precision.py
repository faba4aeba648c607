"""Checks of the section `[float8]`: its keys among each other, the layout, and the hardware."""

from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd

import torch

from float8.hardware import TILE, capability, runnable, supports
from float8.transformer_engine import PACKAGE, TOKENS
from float8.transformer_engine import RECIPES as TRANSFORMER_ENGINE
from moe_titan.config.errors import one_of, show
from moe_titan.config.sections import Config, Float8

_PARTS = {"float8.recipe": "linears", "float8.expert_recipe": "experts"}
_PACKED = ("rowwise", "blockwise")
_SENDS_PACKED = ("auto", "alltoall", "nvlink")


def check_low_precision(config: Config) -> Iterator[str]:
    """One line per problem."""
    recipes = {name: config.get(name) for name in _PARTS if config.get(name) != "none"}
    if not recipes:
        yield from _check_unused(config)
        return
    if config.float8.expert_weight_grad_bf16 and "float8.expert_recipe" not in recipes:
        yield config.problem("float8.expert_weight_grad_bf16", "needs float8.expert_recipe")
    if config.float8.backend == "te":
        yield from _check_transformer_engine(config, recipes)
        return
    if config.float8.all_gather:
        yield from _check_all_gather(config)
    if config.float8.dispatch:
        yield from _check_dispatch(config)
    if config.float8.keep_weights:
        yield from _check_kept(config)
    if config.float8.save_activations:
        yield from _check_saved(config)
    if config.float8.head:
        yield from _check_head(config)
    if config.float8.emulate:
        return
    for name, recipe in recipes.items():
        yield from _check_hardware(config, name, recipe)
    yield from _check_tokens(config, TILE)


def _check_tokens(config: Config, multiple: int) -> Iterator[str]:
    tokens = config.training.local_batch_size * config.training.seq_len
    if config.float8.recipe != "none" and tokens % multiple:
        what = f"times local_batch_size gives {tokens} tokens, which must be a multiple of {multiple} with float8.recipe"
        yield config.problem("training.seq_len", f"{what}; change either")


def _check_all_gather(config: Config) -> Iterator[str]:
    """One copy of a weight serves both its products only in recipes whose scales are the same in both directions."""
    degrees, float8 = config.parallelism, config.float8
    linears = float8.recipe == "tensorwise" and degrees.data_parallel_shard_degree > 1
    experts = float8.expert_recipe == "blockwise" and _expert_data_ranks(config) > 1
    if float8.emulate:
        yield config.problem("float8.all_gather", "needs float8.emulate = false: emulated products read weights in bf16")
    elif not (linears or experts):
        needs = 'needs float8.recipe = "tensorwise" and parallelism.data_parallel_shard_degree above 1, or'
        also = 'float8.expert_recipe = "blockwise" and experts on fewer ranks than hold a replica; set it to false'
        yield config.problem("float8.all_gather", f"{needs} {also}")


def _expert_data_ranks(config: Config) -> int:
    """Ranks of a replica over which FSDP2 shards an expert."""
    degrees = config.parallelism
    replica = degrees.data_parallel_shard_degree * degrees.context_parallel_degree * degrees.tensor_parallel_degree
    return replica // gcd(replica, degrees.expert_parallel_degree * degrees.expert_tensor_parallel_degree)


def _check_packed(config: Config, name: str, why: str) -> Iterator[str]:
    if config.float8.expert_recipe not in _PACKED:
        recipe = show(config.float8.expert_recipe)
        yield config.problem(name, f"needs float8.expert_recipe {one_of(_PACKED)}, {why}, not {recipe}")


def _check_kept(config: Config) -> Iterator[str]:
    name = "float8.keep_weights"
    yield from _check_packed(config, name, "whose weights it keeps")
    if config.float8.emulate:
        yield config.problem(name, "needs float8.emulate = false: emulated products round weights where they use them")
    if _expert_data_ranks(config) > 1:
        what = "needs experts on as many ranks as hold a replica: FSDP2 would shard what is kept whole"
        yield config.problem(name, f"{what}; raise parallelism.expert_parallel_degree or set it to false")


def _check_saved(config: Config) -> Iterator[str]:
    name, recompute = "float8.save_activations", config.activation_checkpoint
    yield from _check_packed(config, name, "whose operands it saves")
    if recompute.mode == "full" or (recompute.mode == "selective" and recompute.selective_ac_option in ("op", "1")):
        what = f"has no effect with activation_checkpoint.mode = {show(recompute.mode)}, which makes pre-activations again"
        yield config.problem(name, f'{what}; set that to "none" or this to false')


def _check_head(config: Config) -> Iterator[str]:
    """Hardware and types are the recipe's matter."""
    recipe, known = config.float8.recipe, ("rowwise", "blockwise")
    if recipe == "none" or (recipe not in known and not config.float8.emulate):
        what = f"needs float8.recipe {one_of(known)}, for which there are kernels, not {show(recipe)}"
        yield config.problem("float8.head", f"{what}; choose that, any other with float8.emulate = true, or set it to false")


def _check_dispatch(config: Config) -> Iterator[str]:
    name = "float8.dispatch"
    yield from _check_packed(config, name, "whose operands it sends")
    if config.moe.dispatcher not in _SENDS_PACKED:
        yield config.problem(name, f"needs moe.dispatcher {one_of(_SENDS_PACKED)}, not {show(config.moe.dispatcher)}")
    if config.parallelism.expert_parallel_degree * config.parallelism.expert_tensor_parallel_degree == 1:
        what = "needs parallelism.expert_parallel_degree or parallelism.expert_tensor_parallel_degree above 1"
        yield config.problem(name, f"{what}: else no token travels")


def _check_unused(config: Config) -> Iterator[str]:
    for name, default in vars(Float8()).items():
        if config.get(f"float8.{name}") != default:
            yield config.problem(f"float8.{name}", "needs float8.recipe or float8.expert_recipe")


def _check_transformer_engine(config: Config, recipes: dict[str, str]) -> Iterator[str]:
    if find_spec(PACKAGE) is None:
        cure = 'install it (pip install "transformer_engine[pytorch]") or set it to "native"'
        yield config.problem("float8.backend", f"the package {PACKAGE} is not installed; {cure}")
    for name in ("emulate", "all_gather", "dispatch", "keep_weights", "save_activations", "head", "expert_weight_grad_bf16"):
        if config.get(f"float8.{name}"):
            yield config.problem(f"float8.{name}", 'must be false with float8.backend = "te", which does not have it')
    if config.moe.stash_factor is not None and "float8.expert_recipe" in recipes:
        what = 'must be none: with float8.backend = "te" Transformer Engine keeps what its experts need'
        yield config.problem("moe.stash_factor", what)
    yield from _check_tokens(config, TOKENS)
    device, capability = _device()
    choices = [recipe for recipe in TRANSFORMER_ENGINE if supports(recipe, capability)]
    for name, recipe in recipes.items():
        if recipe not in choices:
            lacks = f"{device} cannot multiply it" if recipe in TRANSFORMER_ENGINE else "Transformer Engine has no such recipe"
            cure = f"use {one_of(choices)}, which run there" if choices else "it runs on Hopper and later"
            yield config.problem(name, f"{lacks}; {cure}")
        elif config.training.mixed_precision_param != "bfloat16":
            yield config.problem("training.mixed_precision_param", f'must be "bfloat16" with {name} = {show(recipe)}')


def _check_hardware(config: Config, name: str, recipe: str) -> Iterator[str]:
    device, found = _device()
    choices = runnable(_PARTS[name], found)
    if recipe not in choices:
        lacks = f"has no kernels for {_PARTS[name]} yet" if supports(recipe, found) else f"{device} cannot multiply it"
        cure = f"use {one_of(choices)}, which run there, or " if choices else ""
        yield config.problem(name, f"{lacks}; {cure}set float8.emulate = true to compute the same numbers slowly")
    elif config.training.mixed_precision_param != "bfloat16":
        yield config.problem("training.mixed_precision_param", f'must be "bfloat16" with {name} = {show(recipe)}')


def _device() -> tuple[str, tuple[int, int] | None]:
    found = capability()
    if found is None:
        return "a CPU", None
    return f"{torch.cuda.get_device_name()} (compute capability {found[0]}.{found[1]})", found
