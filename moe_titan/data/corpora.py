"""Corpora on the local disk, and the choice of one by `training.dataset`."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_titan.data.source import RandomAccessSource, Source, text_of

if TYPE_CHECKING:
    from moe_titan.config.sections import Training

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_PIECE_BYTES = 1 << 14


class TextFiles(RandomAccessSource):
    """One document per file, read as UTF-8."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def document(self, index: int) -> str:
        return self._files[index].read_bytes().decode(errors="replace")


class CutTextFile(RandomAccessSource):
    """One file, cut at line ends into documents of about `piece_bytes`, so that the streams of a batch read different
    parts of it."""

    def __init__(self, file: Path, piece_bytes: int = _PIECE_BYTES) -> None:
        self._file = file
        self._piece_bytes = piece_bytes
        self._size = file.stat().st_size

    def __len__(self) -> int:
        return -(-self._size // self._piece_bytes)

    def document(self, index: int) -> str:
        with self._file.open("rb") as stream:

            def line_start(offset: int) -> int:
                """The first line start at or after `offset`."""
                if offset == 0 or offset >= self._size:
                    return min(offset, self._size)
                stream.seek(offset - 1)
                stream.readline()
                return stream.tell()

            start, end = (line_start(i * self._piece_bytes) for i in (index, index + 1))
            stream.seek(start)
            return stream.read(end - start).decode(errors="replace")


class JsonLines(RandomAccessSource):
    """One JSON object per line, its text under `text_key`; blank lines are passed over. Eight bytes of index a line.

    Raises:
        ValueError: at once for an empty corpus or a first record without text, on reading for later records.
    """

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self._files = files
        self._text_key = text_key
        self._offsets = [_line_offsets(file) for file in files]
        self._ends = np.cumsum([len(offsets) for offsets in self._offsets])
        if not len(self):
            raise ValueError(
                f"training.dataset_path: no JSON object in {', '.join(map(str, files))}. Choose files with one a line."
            )
        self.document(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def document(self, index: int) -> str:
        file = int(np.searchsorted(self._ends, index, side="right"))
        offset = int(self._offsets[file][index - self._ends[file]])
        where = f"{self._files[file]}, byte {offset}"
        with self._files[file].open("rb") as stream:
            stream.seek(offset)
            try:
                record = json.loads(stream.readline())
            except ValueError as error:
                raise ValueError(
                    f"training.dataset_path: {where}: not one JSON object on a line: {error}. Write one object a line."
                ) from error
        # JSON may escape half of a surrogate pair, which no tokenizer takes.
        return text_of(record, self._text_key, where).encode(errors="replace").decode()


def _line_offsets(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        lengths = np.fromiter((len(line) for line in stream), np.int64)
    return (np.cumsum(lengths) - lengths)[lengths > len(b"\r\n")]


def stdlib_files() -> list[Path]:
    """The source files of the running Python's standard library, without tests and installed packages."""
    return _files_below(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_STDLIB)


def find_files(dataset: str, dataset_path: str, suffixes: Collection[str] = ()) -> list[Path]:
    """The file `dataset_path`, or the files in this folder and below that have one of `suffixes` (none given: any), in
    the order of their relative paths. Hidden and empty files are left out.

    Raises:
        ValueError: the path is not set or does not exist, or there is no such file.
    """
    if not dataset_path:
        raise ValueError(
            f"training.dataset_path is not set, and training.dataset = {dataset!r} reads a file or a folder. "
            "Set training.dataset_path to it."
        )
    root = Path(dataset_path)
    if not root.exists():
        raise ValueError(
            f"training.dataset_path = {dataset_path!r} does not exist. Set it to the file or folder that "
            f"training.dataset = {dataset!r} is to read (current folder: {Path.cwd()})."
        )
    files = _files_below(root, suffixes) if root.is_dir() else [root] if root.stat().st_size else []
    if not files:
        raise ValueError(
            f"training.dataset_path = {dataset_path!r} holds no file to train on: training.dataset = {dataset!r} reads "
            f"files that are not empty{' and end in ' + ' or '.join(suffixes) if suffixes else ''}."
        )
    return files


def _files_below(root: Path, suffixes: Collection[str], excluded: Collection[str] = ()) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files = [file for file in files if not suffixes or file.suffix in suffixes]
    return sorted(
        (file for file in files if file.is_file() and file.stat().st_size),
        key=lambda file: file.relative_to(root).as_posix(),
    )


def build_source(training: Training) -> Source:
    """The corpus that `training.dataset`, `dataset_path`, `dataset_config`, `dataset_split` and `text_key` name.

    Raises:
        ValueError: the corpus is missing, empty or has no text under the key; names the key and the cure.
    """
    dataset, path, text_key = training.dataset, training.dataset_path or "", training.text_key
    if dataset == "stdlib":
        return TextFiles(stdlib_files())
    if dataset == "text":
        files = find_files(dataset, path)
        return CutTextFile(files[0]) if Path(path).is_file() else TextFiles(files)
    if dataset in ("json", "c4_test"):
        default = "tests/assets/c4_test" if dataset == "c4_test" else ""
        return JsonLines(find_files(dataset, path or default, (".jsonl", ".json")), text_key)
    # The `datasets` library takes seconds to import.
    from moe_titan.data import hugging_face

    if dataset == "parquet":
        return hugging_face.parquet_source(training, find_files(dataset, path, (".parquet",)))
    return hugging_face.named_source(training)
