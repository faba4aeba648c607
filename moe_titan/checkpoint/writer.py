"""Writing a checkpoint's files, and with the last of them the manifest."""

import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from moe_titan.interchange.manifest import FileSum, Manifest, SummedFile, damage
from moe_titan.interchange.metadata import METADATA


class _Written(list[WriteResult]):
    """What a rank tells rank 0: what it has written, and the sums of its files."""

    files: dict[str, FileSum]


class _SummingFileSystem(FileSystem):
    def __init__(self, checksums: bool):
        self.files: dict[str, SummedFile] = {}
        self._checksums = checksums

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            summed = self.files[Path(path).name] = SummedFile(cast(IO[bytes], stream), self._checksums)
            yield cast(io.IOBase, summed)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def sums(self) -> dict[str, FileSum]:
        return {name: file.sum for name, file in self.files.items()}


@contextmanager
def _one_sum() -> Generator[None, None, None]:
    """torch.save would sum up each tensor a second time, for a field that torch.load does not read."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class Writer(FileSystemWriter):
    """torch.distributed.checkpoint's writer, which sums up what it writes.

    Args:
        path: a new folder.
        layout: parallel degrees, for the manifest.
        commit: called on rank 0 once everything has been written and is as long as it should be.
    """

    def __init__(self, path: Path, layout: dict[str, int], checksums: bool, commit: Callable[[], None]):
        # Nothing ahead: the planner lends the same memory again and again.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = self._summing = _SummingFileSystem(checksums)
        self._folder, self._layout, self._commit = path, layout, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            with _one_sum():
                written = _Written(super().write_data(plan, planner).value())
        except RuntimeError as error:
            raise next((file.error for file in self._summing.files.values() if file.error), error) from None
        written.files = self._summing.sums()
        answer: Future[list[WriteResult]] = Future()
        answer.set_result(written)
        return answer

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {name: sum for written in results for name, sum in cast(_Written, written).files.items()}
        files[METADATA] = self._summing.sums()[METADATA]
        if lost := damage(self._folder, files.items(), checksums=False):
            raise OSError("; ".join(lost))
        Manifest(self._layout, files).write(self._folder)
        self._commit()
