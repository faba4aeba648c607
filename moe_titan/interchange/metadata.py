"""The ``.metadata`` of a torch.distributed.checkpoint folder, a pickle, read so that nothing else in it can run."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from moe_titan.interchange.tensors import InterchangeError

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Raises InterchangeError where the folder has no metadata, or metadata that is damaged or names anything but DCP's types."""
    file = path / METADATA
    if not file.exists():
        raise InterchangeError(
            f"{path}: no complete checkpoint is there (no {METADATA}); give the folder of one step, such as "
            "outputs/checkpoint/step-1000"
        )
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except Exception as error:  # A damaged pickle raises almost anything.
        raise InterchangeError(f"{file}: cannot be read ({error})") from error
    if not isinstance(metadata, Metadata):
        raise InterchangeError(f"{file}: holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata
