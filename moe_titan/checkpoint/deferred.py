"""Tensors that the run does not hold as the checkpoint does: one at a time is made when it is written, and taken apart when read.

So a save and a load need no second copy of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from kernels.adamw import split_fp32
from moe_titan.interchange.dcp import LoadPlanner
from parallelisms.sharding_plan import local
from parallelisms.split_weights import Split


@dataclass(frozen=True)
class Deferred:
    """``make`` gives this rank's shard, of type ``dtype`` and shaped like ``placed``'s, which says where it lies in the whole."""

    placed: Tensor
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Of this rank's shard."""
        return local(self.placed).numel() * self.dtype.itemsize


def as_written(value: Tensor | Split, dtype: torch.dtype | None = None) -> Tensor | Deferred:
    """A parameter as it is to be saved, in ``dtype`` if given."""
    dtype = dtype or value.dtype
    if isinstance(value, Split):
        return Deferred(value.high, dtype, lambda: value.join().to(dtype))
    return value if value.dtype == dtype else Deferred(value, dtype, lambda: local(value).to(dtype))


def placed_like(shard: Tensor, tensor: Tensor) -> Tensor:
    """As a shard of what ``tensor`` is one of, on whatever device: DTensor.from_local would take it to the mesh's."""
    return DTensor(shard, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else shard


class SavePlanner(DefaultSavePlanner):
    """Saves a state some of whose tensors are deferred. ``state`` is what is to be given to torch.distributed.checkpoint."""

    def __init__(self, state: dict[str, Any]):
        super().__init__()
        self._deferred = {key: value for key, value in state.items() if isinstance(value, Deferred)}
        self._scratch: dict[tuple, Tensor] = {}
        self.state = state | {key: _without_data(value) for key, value in self._deferred.items()}

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if not isinstance(data, Tensor) or (write_item.index.fqn not in self._deferred and _is_written_as_it_is(data)):
            return data
        # What the writer copies, and what is made for it, it keeps until the file is whole: a copy of the state. Of tensors
        # that are alike it keeps this one; and for new pages the system takes longer than for the copy.
        kind = (data.shape, data.dtype)
        if kind not in self._scratch:
            self._scratch[kind] = torch.empty(data.shape, dtype=data.dtype)
        return self._scratch[kind].copy_(data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        deferred = self._deferred.get(index.fqn)
        return super().lookup_object(index) if deferred is None else deferred.make()


def _is_written_as_it_is(tensor: Tensor) -> bool:
    """By torch's writer, which writes storages."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _without_data(deferred: Deferred) -> Tensor:
    return placed_like(torch.empty_like(local(deferred.placed), dtype=deferred.dtype, device="meta"), deferred.placed)


class SplittingLoadPlanner(LoadPlanner):
    """Loads into a state some of whose tensors are split. ``state`` is what is to be given to torch.distributed.checkpoint."""

    def __init__(self, state: dict[str, Any]):
        super().__init__()
        self._lows = {key: local(value.low) for key, value in state.items() if isinstance(value, Split)}
        self.state = {key: value.high if isinstance(value, Split) else value for key, value in state.items()}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = super().resolve_tensor(read_item)
        return torch.empty_like(tensor, dtype=torch.float32) if read_item.dest_index.fqn in self._lows else tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if (low := self._lows.get(read_item.dest_index.fqn)) is not None:
            halves = super().resolve_tensor(read_item), self.transform_tensor(read_item, low)
            for half, value in zip(halves, split_fp32(tensor), strict=True):
                half.copy_(value)
