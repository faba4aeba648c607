"""Stands in for Transformer Engine: its documented signatures, as of 2.20, around products in plain PyTorch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

calls: list[tuple[str, str, Any]] = []  # kind of layer, recipe, sizes of groups
_active: list[Any] = []


class Recipe:
    """A class of its own per recipe, as users name them."""


RECIPES = {name: type(name, (Recipe,), {}) for name in
           ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")}  # fmt: skip


@contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None, amax_reduction_group: Any = None, _graph=False
) -> Iterator[None]:
    assert enabled and isinstance(recipe, Recipe)
    _active.append(recipe)
    try:
        yield
    finally:
        _active.pop()


def _note(kind: str, sizes: Any) -> None:
    [recipe] = _active
    calls.append((kind, type(recipe).__name__, sizes))


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        assert not bias and in_features % 16 == 0 and out_features % 16 == 0
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Tensor:
        assert inp.dtype == self.weight.dtype == torch.bfloat16 and inp.shape[:-1].numel() % 16 == 0
        _note("Linear", None)
        return nn.functional.linear(inp, self.weight)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            self.register_parameter(f"weight{index}", weight)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp) and not any(size % 32 for size in m_splits)
        assert inp.dtype == weights[0].dtype == torch.bfloat16
        _note("GroupedLinear", m_splits)
        rows = inp.split(m_splits)
        return torch.cat([nn.functional.linear(x, weight) for x, weight in zip(rows, weights, strict=True)])


def modules() -> dict[str, ModuleType]:
    """What to put into ``sys.modules``."""
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe", "transformer_engine.pytorch")
    found = {name: ModuleType(name) for name in names}
    for name, module in found.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(found[parent], leaf, module)
    vars(found["transformer_engine.common.recipe"]).update(RECIPES)
    vars(found["transformer_engine.pytorch"]).update(Linear=Linear, GroupedLinear=GroupedLinear, autocast=autocast)
    return found


def install() -> None:
    """For a process of its own."""
    sys.modules.update(modules())
