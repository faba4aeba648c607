"""Initial weights that depend on the seed and a parameter's name alone, not on the layout, the device or the order.

The model's own ``init_weights`` says how each parameter is filled. It runs once on meta tensors while its calls of
``torch.nn.init`` are noted instead of carried out; every rank then fills its shards as noted, with random numbers that are a
function of (seed, name, index of the element), so that any shard can be made alone.
"""

import hashlib
import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parallelisms.sharding_plan import logical_tensors

_CHUNK = 1 << 24


def _normal(unit: Tensor, *, mean: float, std: float) -> Tensor:
    return mean + std * math.sqrt(2) * torch.erfinv(2 * unit - 1)


def _trunc_normal(unit: Tensor, *, mean: float, std: float, a: float, b: float) -> Tensor:
    low, high = (0.5 * (1 + math.erf((bound - mean) / (std * math.sqrt(2)))) for bound in (a, b))
    return _normal(low + (high - low) * unit, mean=mean, std=std).clamp(a, b)


def _uniform(unit: Tensor, *, a: float, b: float) -> Tensor:
    return a + (b - a) * unit


FILLS: dict[str, Callable[..., Tensor]] = {
    "normal_": _normal,
    "trunc_normal_": _trunc_normal,
    "uniform_": _uniform,
    "constant_": lambda unit, *, val: torch.full_like(unit, val),
    "ones_": torch.ones_like,
    "zeros_": torch.zeros_like,
}
"""Functions of ``torch.nn.init`` as maps from numbers uniform on (0, 1), fp64."""

Fill = tuple[str, dict[str, Any]]


@torch.no_grad()
def record_initialization(model: nn.Module, device: torch.device) -> dict[str, Fill]:
    """Runs ``model.init_weights`` on its fp32 meta parameters; returns how each is filled, by name in the state dict.

    Buffers come into being on ``device`` with their values.
    """
    names = {
        _place(view): logical
        for name, parameter in model.named_parameters()
        for logical, view in logical_tensors(name, parameter)
    }
    fills: dict[str, Fill] = {}

    def noting(function: str) -> Callable[..., Tensor]:
        signature = inspect.signature(getattr(nn.init, function))

        def note(*args: Any, **kwargs: Any) -> Tensor:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensor = bound.arguments.pop("tensor")
            bound.arguments.pop("generator", None)
            fills[names[_place(tensor)]] = (function, dict(bound.arguments))
            return tensor

        return note

    with ExitStack() as stack:
        for function in FILLS:
            stack.enter_context(patch.object(nn.init, function, noting(function)))
        model.init_weights(buffer_device=device)
    return fills


@torch.no_grad()
def initialize(model: nn.Module, fills: dict[str, Fill], seed: int, device: torch.device) -> None:
    """Gives the sharded meta parameters storage on ``device`` and fills every rank's shards.

    Args:
        model: its buffers already lie on ``device`` (see :func:`record_initialization`) and keep their values.
    Raises:
        KeyError: a parameter that ``init_weights`` never filled.
    """
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    if getattr(model, "enable_weight_tying", False):
        model.output.weight = model.tok_embeddings.weight  # which to_empty takes apart
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        for logical, tensor in logical_tensors(name, parameter):
            function, arguments = fills[logical]
            _fill(tensor, f"{seed}/{logical}", function, arguments)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Identifies a tensor or a view of one, also on the meta device."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _fill(tensor: Tensor, key: str, function: str, arguments: dict[str, Any]) -> None:
    local, offset = tensor, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    values = torch.empty_like(local, memory_format=torch.contiguous_format)
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
    flat, numel = values.view(-1), values.numel()
    for start in range(0, numel, _CHUNK):
        place = torch.arange(start, min(start + _CHUNK, numel), device=values.device)
        index, stride = torch.zeros_like(place), 1
        for size, local_size, begin in zip(reversed(tensor.shape), reversed(local.shape), reversed(offset), strict=True):
            index += (place % local_size + begin) * stride
            place //= local_size
            stride *= size
        # 53 random bits, centred in their cells so that 0 and 1 never come out.
        unit = (_shift(_mix(index, seed), 11).double() + 0.5) * 2.0**-53
        flat[start : start + _CHUNK] = FILLS[function](unit, **arguments)
    local.copy_(values)


def _mix(index: Tensor, seed: int) -> Tensor:
    """SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator; int64 arithmetic wraps."""
    x = index * -7046029254386353131 + seed
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
