"""Tensors that lie on a disk and are read when they are needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class InterchangeError(ValueError):
    """A checkpoint that cannot be read, converted or written as asked; the message names the file or key and the cure."""


@dataclass(frozen=True)
class Lazy:
    """A tensor of known shape and dtype that ``load`` reads or computes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    def to(self, dtype: torch.dtype) -> "Lazy":
        return self if dtype == self.dtype else Lazy(self.shape, dtype, lambda: self.load().to(dtype))

    def __getitem__(self, index: Any) -> "Lazy":
        """A part of it; ``index`` is of slices and integers."""
        shape = torch.empty(self.shape, device="meta")[index].shape
        return Lazy(tuple(shape), self.dtype, lambda: self.load()[index])


Parts = Lazy | list[Lazy]
"""A tensor, or the parts that lie behind one another along a new first dimension: the experts of a stacked weight."""


def shape_of(parts: Parts) -> tuple[int, ...]:
    return (len(parts), *parts[0].shape) if isinstance(parts, list) else parts.shape


def cast(parts: Parts, dtype: torch.dtype) -> Parts:
    return [part.to(dtype) for part in parts] if isinstance(parts, list) else parts.to(dtype)


class LastRead:
    """Reads tensors by name and keeps the last one, so that a tensor wanted in parts, one after the other, is read once."""

    def __init__(self, read: Callable[[str], Tensor]):
        self._read = read
        self._name: str | None = None
        self._tensor: Tensor | None = None

    def __call__(self, name: str) -> Tensor:
        if self._tensor is None or name != self._name:
            self._tensor = None  # Frees it before the next one is read.
            self._tensor, self._name = self._read(name), name
        return self._tensor
