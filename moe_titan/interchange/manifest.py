"""``manifest.json`` beside a checkpoint's ``.metadata``: size and CRC-32 of every file, and the layout that saved them."""

import itertools
import json
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from moe_titan.interchange.tensors import InterchangeError

MANIFEST = "manifest.json"
_BLOCK = 1 << 24
_SMALL = 1 << 18
"""Bytes that are summed up in less time than handing them to a thread takes."""


class FileSum(NamedTuple):
    """Length in bytes and CRC-32 of a file; None where it was not recorded."""

    bytes: int
    crc32: int | None


@dataclass(frozen=True)
class Manifest:
    """``layout``: parallel degrees by dimension. ``files``: by name."""

    layout: dict[str, int]
    files: dict[str, FileSum]

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1))


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none: only this project writes them. Raises InterchangeError where it is damaged."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_bytes())
        files = {name: FileSum(int(size), crc if crc is None else int(crc)) for name, (size, crc) in content["files"].items()}
        return Manifest(content["layout"], files)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InterchangeError(f"{file}: cannot be read ({error!r})") from error


def recorded_files(metadata: Metadata, manifest: Manifest | None) -> dict[str, FileSum]:
    """What is known of a checkpoint's files; without a manifest, up to where each is used."""
    files: dict[str, FileSum] = {}
    for info in metadata.storage_data.values():
        end = max(info.offset + info.length, files[info.relative_path].bytes if info.relative_path in files else 0)
        files[info.relative_path] = FileSum(end, None)
    return files | (manifest.files if manifest else {})


def damage(folder: Path, files: Iterable[tuple[str, FileSum]], checksums: bool) -> list[str]:
    """What is wrong with each file that is not as it was saved; reads them whole if asked for checksums."""
    return [problem for name, saved in files if (problem := _problem(folder / name, saved, checksums))]


def _problem(file: Path, saved: FileSum, checksums: bool) -> str | None:
    try:
        if (size := file.stat().st_size) < saved.bytes:
            return f"{file} is cut off: {size} of {saved.bytes} bytes"
        if checksums and saved.crc32 is not None and (found := checksum(file)) != saved:
            return f"{file} is damaged: its CRC-32 is {found.crc32:08x}, and was {saved.crc32:08x} when it was saved"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None


def checksum(file: Path) -> FileSum:
    """Sums up a block while the next one is read."""
    size, crc, blocks = 0, _Sum(), itertools.cycle([memoryview(bytearray(_BLOCK)) for _ in range(2)])
    with file.open("rb", buffering=0) as stream:
        while read := stream.readinto(block := next(blocks)):
            size += read
            crc.add(block[:read])
    return FileSum(size, crc.value())


class _Sum:
    """A CRC-32 that a thread of its own works out: zlib leaves Python's lock to others meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.value: Callable[[], int] = lambda: 0

    def add(self, data: Any) -> None:
        """Waits for what was added before; ``data`` must not change before ``value()`` or the next call."""
        before = self.value()
        if memoryview(data).nbytes < _SMALL:
            crc = zlib.crc32(data, before)
            self.value = lambda: crc
        else:
            self.value = self._thread.submit(zlib.crc32, data, before).result


class SummedFile:
    """A file that is written from its start to its end, and the sum of what has been written.

    ``error`` is why it could not be: torch.save turns every exception into a RuntimeError about positions.
    """

    def __init__(self, stream: IO[bytes], checksums: bool):
        self._stream = stream
        self._size, self._crc = 0, _Sum() if checksums else None
        self.error: OSError | None = None

    @property
    def sum(self) -> FileSum:
        return FileSum(self._size, None if self._crc is None else self._crc.value())

    def write(self, data: Any) -> int:
        self._size += memoryview(data).nbytes
        if self._crc is not None:
            self._crc.add(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if self._crc is not None:
                self._crc.value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
