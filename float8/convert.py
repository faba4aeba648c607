"""Puts a recipe into the modules of a model, and says which."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import nn

from float8.emulation import EmulatedLinear
from float8.experts import EmulatedProducts, Float8Products
from float8.hardware import HOPPER, capability
from float8.head import EmulatedHead, RowwiseHead
from float8.kernel_linear import KernelLinear
from float8.recipes import RECIPES
from float8.transformer_engine import TransformerEngineExperts, TransformerEngineLinear
from kernels.expert_mlp import Products
from kernels.packed_tokens import Packing

Parts = tuple[int, int]
BACKENDS = {"native": "", "te": ", Transformer Engine"}


@dataclass(frozen=True)
class Float8Options:
    """Recipes of linear layers and of routed experts ("none" or a key of :data:`float8.recipes.RECIPES`), and what is exempt.

    ``filter_fqns``: a module whose name contains one of these stays as it is, as do all modules of the first and last so many
    blocks. ``expert_weight_grad_bf16``: the experts' weight gradient is not quantised. ``emulate``: compute on any machine what
    the recipe's kernels would, slowly. ``all_gather``: FSDP2 gathers weights in FP8 where one quantisation serves all products.
    ``dispatch``: tokens travel to the experts quantised. ``save_activations``: experts save their pre-activations for backward
    quantised. ``keep_weights``: experts' weights are quantised once a step. ``head``: the output projection is in ``recipe`` too,
    its weight's gradient only if that is ``rowwise``. ``backend``: torchao and our kernels, or Transformer Engine.
    """

    recipe: str = "none"
    expert_recipe: str = "none"
    filter_fqns: Sequence[str] = ()
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    expert_weight_grad_bf16: bool = False
    emulate: bool = False
    all_gather: bool = False
    backend: Literal["native", "te"] = "native"
    dispatch: bool = False
    keep_weights: bool = False
    save_activations: bool = False
    head: bool = False

    @property
    def enabled(self) -> bool:
        return (self.recipe, self.expert_recipe) != ("none", "none")


@dataclass
class Conversion:
    """Names of modules: ``converted`` with what runs in them, ``left`` with the reason."""

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """A line per module: its name and what became of it."""
        lines = [f"{name}: {recipe}" for name, recipe in self.converted.items()]
        return "\n".join([*lines, *(f"{name}: left, {reason}" for name, reason in self.left.items()), ""])

    def summary(self) -> str:
        """A line per kind of module, with the number of such modules in brackets."""
        kinds = Counter(re.sub(r"\.\d+\.", ".*.", line) for line in self.table().splitlines())
        return "\n".join(f"{kind} ({count})" for kind, count in kinds.items())


def convert(
    model: nn.Module, options: Float8Options, expert_tensor_parallel_degree: int = 1, parts: Mapping[str, Parts] | None = None
) -> Conversion:
    """Converts the blocks' linear layers and experts, and the head if asked to, in place and under the same names, before any
    parallelism.

    Never converted: router, embedding, norms, attention core.

    Args:
        parts: into how many parts tensor parallelism will cut the two dimensions of linear layers' weights, by name of the layer.

    Raises:
        ValueError: a recipe finds no module to convert, or a filter none to exempt.
    """
    candidates = list(_candidates(model, options))
    names = [name for name, _, _ in candidates]
    for text in options.filter_fqns:
        if not any(text in name for name in names):
            raise ValueError(f'float8.filter_fqns: "{text}" is part of no name that a recipe could convert: {_kinds(names)}')
    result, by_what = Conversion(), ", emulated" if options.emulate else BACKENDS[options.backend]
    for name, module, key in candidates:
        recipe = getattr(options, key)
        reason = _exempt(name, len(model.layers), options) or _untiled(
            module, recipe, (parts or {}).get(name, (1, expert_tensor_parallel_degree))
        )
        if reason:
            result.left[name] = reason
        else:
            _convert_module(model, name, module, recipe, options)
            result.converted[name] = recipe + by_what
    if options.head:
        recipe = "rowwise" if options.recipe == "blockwise" else options.recipe  # the head's scales are of whole rows
        _convert_head(model.output, recipe, options.emulate, (parts or {}).get("output", (1, 1)))
        gradients = "gradients" if RECIPES[recipe].turns_rows else "input gradient"
        result.converted["output"] = f"{recipe}, logits and {gradients}{by_what}"
    for key in ("recipe", "expert_recipe"):
        _check_converted(options, key, [name for name, _, other in candidates if other == key], result)
    return result


def _candidates(model: nn.Module, options: Float8Options) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules that a chosen recipe is for, with the name of its option."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if isinstance(getattr(module, "products", None), Products):
            key = "expert_recipe"
        elif isinstance(module, nn.Linear) and ".router." not in name:
            key = "recipe"
        else:
            continue
        if getattr(options, key) != "none":
            yield name, module, key


def _exempt(name: str, num_layers: int, options: Float8Options) -> str | None:
    index = int(name.split(".")[1])
    if index < options.first_layers_bf16:
        return f"one of the first {options.first_layers_bf16} layers"
    if index >= num_layers - options.last_layers_bf16:
        return f"one of the last {options.last_layers_bf16} layers"
    matches = [text for text in options.filter_fqns if text in name]
    return f'contains "{matches[0]}"' if matches else None


def _untiled(module: nn.Module, recipe: str, parts: Parts) -> str | None:
    """Why the recipe's kernels cannot cut a rank's part of the module's weights (of experts w2's) into tiles."""
    if isinstance(module, nn.Linear):
        if module.bias is not None:
            return "has a bias"
        whole = module.out_features, module.in_features
    else:
        whole = module.w2.shape[1], module.w2.shape[2]
    sizes = [size // count for size, count in zip(whole, parts, strict=True)]
    tile = RECIPES[recipe].tile
    wrong = [str(size) for size in sizes if size % tile]
    return f"{' and '.join(wrong)} not a multiple of {tile}" if wrong else None


def _convert_module(model: nn.Module, name: str, module: nn.Module, recipe: str, options: Float8Options) -> None:
    if not isinstance(module, nn.Linear):
        if options.backend == "te":
            module.mlp = TransformerEngineExperts(recipe)
        else:
            module.products = expert_products(recipe, options)
            module.products.packing = Packing(recipe == "blockwise") if options.dispatch else None
        return
    if options.backend == "te":
        linear: nn.Linear = TransformerEngineLinear(module, recipe)
    elif options.emulate:
        linear = EmulatedLinear(module, RECIPES[recipe])
    elif recipe == "blockwise" or (recipe == "rowwise" and capability() == HOPPER):
        linear = KernelLinear(module, recipe == "blockwise")
    else:
        from float8.torchao_linear import TorchaoLinear  # slow to import

        linear = TorchaoLinear.of(module, recipe)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, linear)


def _convert_head(head: nn.Linear, recipe: str, emulate: bool, parts: Parts) -> None:
    if reason := _untiled(head, recipe, parts):
        what = "divide the vocabulary over fewer ranks, or set it to false" if parts[0] > 1 else "set it to false"
        raise ValueError(f"float8.head = true: of the weight's sizes {reason}, which float8.recipe needs; {what}")
    head.products = partial(EmulatedHead, recipe=RECIPES[recipe]) if emulate else RowwiseHead


def expert_products(recipe: str, options: Float8Options) -> Products:
    """The grouped products of experts in a recipe."""
    settings = options.expert_weight_grad_bf16, options.save_activations
    if options.emulate:
        return EmulatedProducts(RECIPES[recipe], *settings)
    return Float8Products(recipe == "blockwise", *settings)


def _check_converted(options: Float8Options, key: str, candidates: list[str], result: Conversion) -> None:
    recipe = getattr(options, key)
    if recipe == "none" or any(name in result.converted for name in candidates) or (key == "recipe" and options.head):
        return
    what = "expert layer" if key == "expert_recipe" else "linear layer"
    reasons = Counter(result.left[name] for name in candidates)
    why = "; ".join(f"{count} left: {reason}" for reason, count in reasons.items()) or "the model has none"
    raise ValueError(
        f'float8.{key} = "{recipe}" converts no {what} ({why}); choose another recipe, exempt less, or set it to "none"'
    )


def _kinds(names: list[str]) -> str:
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})) or "there is none"
