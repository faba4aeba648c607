"""Checkpoints of torch.distributed.checkpoint, read and written tensor by tensor in one process.

Nothing that a checkpoint holds is executed: see :mod:`moe_titan.interchange.metadata`; objects are read with ``weights_only``.
"""

import io
import itertools
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from moe_titan.interchange.dialects import dialect_of, to_dialect
from moe_titan.interchange.manifest import checksum, read_manifest
from moe_titan.interchange.metadata import METADATA, read_metadata
from moe_titan.interchange.tensors import InterchangeError, LastRead, Lazy, Parts, shape_of

RUN_STATE = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader.", "rng.", "expert_placement.")
"""What the keys of a run's state begin with; the other keys are the model's."""


class Checkpoint:
    """What a folder of one step holds, under torchtitan 0.2.2's keys whatever its dialect.

    Raises:
        InterchangeError: it is not complete, or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata = read_metadata(path)
        self.entries = self.metadata.state_dict_metadata
        self.dialect = dialect_of(self.entries)
        self.stored = {key: stored for stored, key in to_dialect(self.entries, "0.2.2").items()}
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._last_read = LastRead(lambda key: self._read(key, self._empty(key)))

    def model_keys(self) -> list[str]:
        return [key for key in self.stored if not key.startswith(RUN_STATE)]

    def tensor_keys(self) -> list[str]:
        return [key for key in self.stored if isinstance(self._entry(key), TensorStorageMetadata)]

    def tensor(self, key: str) -> Lazy:
        entry = self._entry(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise InterchangeError(f"{self.path}: {key} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
            raise InterchangeError(f"{self.path}: parts of {key} are missing")
        return Lazy(tuple(entry.size), entry.properties.dtype, lambda: self._last_read(key))

    def value(self, key: str) -> Any:
        """An object that is saved beside the tensors, or the number that a tensor of one element holds."""
        if isinstance(self._entry(key), TensorStorageMetadata):
            return self.tensor(key).load().item()
        return self._read(key, None)

    def _entry(self, key: str) -> Any:
        return self.entries[self.stored[key]]

    def _empty(self, key: str) -> Tensor:
        entry = self._entry(key)
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def _read(self, key: str, target: Any) -> Any:
        stored = self.stored[key]
        planner = LoadPlanner()
        planner.set_up_planner({stored: target}, self.metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise InterchangeError(f"{self.path}: {key} cannot be read ({error}); use another checkpoint") from error
        return planner.objects.get(stored, target)


class LoadPlanner(DefaultLoadPlanner):
    """Reads objects, which DCP pickles, as numbers, texts and tensors alone, into ``objects``; tensors in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def write_checkpoint(path: Path, tensors: dict[str, Parts], dialect: str) -> None:
    """Writes a model, given under 0.2.2's keys, as a checkpoint of ``dialect``: a file per layer, stacked parts as chunks."""
    names = to_dialect(tensors, dialect)
    named = {names[key]: parts for key, parts in tensors.items()}
    # DCP holds on to a tensor of each key until a file is whole: a file is a layer.
    layers = itertools.groupby(named, lambda key: match[0] if (match := re.match(r"layers\.\d+\.", key)) else key)
    plans, metadata = create_default_global_save_plan(
        [SavePlan([item for key in keys for item in _write_items(key, named[key])]) for _, keys in layers]
    )
    metadata = replace(metadata, planner_data={key: (key,) for key in named})
    # Without looking ahead it keeps the order of the items, which LastRead counts on.
    writer = FileSystemWriter(path, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    planner = _SavePlanner(named)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])


class _SavePlanner(DefaultSavePlanner):
    """Reads a tensor when its turn to be written has come."""

    def __init__(self, tensors: dict[str, Parts]):
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        parts, offset = self._tensors[write_item.index.fqn], write_item.index.offset
        if isinstance(parts, Lazy):
            return parts.load()
        assert offset is not None
        return parts[offset[0]].load()[None]


def _write_items(key: str, parts: Parts) -> list[WriteItem]:
    size = torch.Size(shape_of(parts))
    dtype = (parts[0] if isinstance(parts, list) else parts).dtype
    rest = [0] * (len(size) - 1)
    if isinstance(parts, list):
        chunks = [ChunkStorageMetadata(torch.Size([n, *rest]), torch.Size([1, *size[1:]])) for n in range(len(parts))]
    else:
        chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties(dtype=dtype), size),
        )
        for chunk in chunks
    ]


def write_in_dialect(source: Checkpoint, target: Path, dialect: str) -> None:
    """The whole checkpoint, run and all, with its keys in another dialect. The files are linked where the file system can."""
    paths = source.metadata.planner_data or {}
    names = to_dialect({*source.entries, *(part for path in paths.values() for part in path if isinstance(part, str))}, dialect)
    metadata = replace(
        source.metadata,
        state_dict_metadata={names[key]: entry for key, entry in source.entries.items()},
        storage_data={replace(index, fqn=names[index.fqn]): info for index, info in source.metadata.storage_data.items()},
        planner_data={names[key]: tuple(names.get(part, part) for part in path) for key, path in paths.items()},
    )
    for file in sorted({info.relative_path for info in metadata.storage_data.values()}):
        _link_or_copy(source.path / file, target / file)
    with (target / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)
    if (manifest := read_manifest(source.path)) is not None:
        replace(manifest, files=manifest.files | {METADATA: checksum(target / METADATA)}).write(target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise InterchangeError(f"{source}: is missing; use another checkpoint") from error
    except OSError:
        shutil.copy2(source, target)
