"""Folders of safetensors files: reading tensor by tensor, and writing without holding more than one.

The format: 8 bytes with the length of a JSON header, the header (dtype, shape and place of each tensor), the tensors.
"""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_titan.interchange.quantized import SCALE_SUFFIX, dequantize
from moe_titan.interchange.tensors import InterchangeError, LastRead, Lazy

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def holds_safetensors(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or (path / INDEX).exists()


class SafetensorsFolder:
    """The tensors of a folder by name. FP8 weights appear dequantised, without their scales.

    Args:
        block: rows and columns that share a scale, where there are FP8 weights.
        dequantized: dtype that FP8 weights take.
    """

    def __init__(self, path: Path, block: tuple[int, int] | None = None, dequantized: torch.dtype = torch.bfloat16):
        self.path, self.block, self.dequantized = path, block, dequantized
        self._files = {file: _open(file) for file in _files(path)}
        self._stored = {name: handle for handle in self._files.values() for name in handle.keys()}
        self._check_index()
        self._read = LastRead(self._load)

    def names(self) -> list[str]:
        scales = {name + SCALE_SUFFIX for name in self._stored}
        return [name for name in self._stored if name not in scales]

    def tensor(self, name: str) -> Lazy:
        shape, stored = self._kind(name)
        if stored != torch.float8_e4m3fn:
            return Lazy(shape, stored, lambda: self._read(name))
        if self.block is None or name + SCALE_SUFFIX not in self._stored:
            raise InterchangeError(
                f"{self.path}: {name} is FP8 without scales of blocks; FP8 weights are read where config.json has "
                f"quantization_config.weight_block_size and the weight its {SCALE_SUFFIX}"
            )
        expected = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        if (scales := self._kind(name + SCALE_SUFFIX)[0]) != expected:
            raise InterchangeError(f"{self.path}: {name}{SCALE_SUFFIX} has shape {list(scales)}, expected {list(expected)}")
        return Lazy(shape, self.dequantized, lambda: self._read(name))

    def _kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        view = self._stored[name].get_slice(name)
        if (dtype := view.get_dtype()) not in DTYPES:
            raise InterchangeError(f"{self.path}: {name} is of type {dtype}; can be read: {', '.join(DTYPES)}")
        return tuple(view.get_shape()), DTYPES[dtype]

    def _load(self, name: str) -> Tensor:
        tensor = self._stored[name].get_tensor(name)
        if tensor.dtype != torch.float8_e4m3fn or self.block is None:
            return tensor
        scale_name = name + SCALE_SUFFIX
        return dequantize(tensor, self._stored[scale_name].get_tensor(scale_name), self.block).to(self.dequantized)

    def _check_index(self) -> None:
        if (index := self.path / INDEX).exists():
            lost = sorted(read_json(index)["weight_map"].keys() - self._stored.keys())
            if lost:
                raise InterchangeError(f"{index} names {len(lost)} tensors that no file holds, first {lost[0]}")


def _files(path: Path) -> list[Path]:
    if (index := path / INDEX).exists():
        return [path / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    return sorted(path.glob("*.safetensors"))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InterchangeError(f"{file}: cannot be read ({error}); download or copy it again") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InterchangeError(f"{file}: not readable as JSON ({error})") from error


def write_safetensors(folder: Path, tensors: dict[str, Lazy], shard_bytes: int) -> None:
    """Writes ``model.safetensors``, or numbered files of at most ``shard_bytes`` (or one tensor) and their index."""
    shards: list[dict[str, Lazy]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _bytes(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += _bytes(tensor)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _bytes(tensor: Lazy) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _write_file(file: Path, tensors: dict[str, Lazy]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The tensors begin at a multiple of 8.
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            stream.write(tensor.load().contiguous().flatten().view(torch.uint8).numpy().data)
