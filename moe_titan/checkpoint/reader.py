"""Reading a checkpoint without running anything that it holds, after its files have been checked."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from moe_titan.checkpoint.deferred import SplittingLoadPlanner
from moe_titan.checkpoint.errors import CheckpointError, first_cause
from moe_titan.checkpoint.folder import previous
from moe_titan.interchange import InterchangeError
from moe_titan.interchange.dialects import to_dialect
from moe_titan.interchange.manifest import damage, read_manifest, recorded_files
from moe_titan.interchange.metadata import read_metadata


class StoredRun:
    """A checkpoint to load, under torchtitan 0.2.2's keys whatever its dialect. All ranks must use it together.

    Args:
        checksums: read the files and compare them with the sums that were recorded. Each rank takes some of the files.

    Raises:
        CheckpointError: it is damaged; the message names the file and the checkpoint before.
    """

    def __init__(self, path: Path, checksums: bool):
        self.path = path
        try:
            self._metadata = read_metadata(path)
            files = sorted(recorded_files(self._metadata, read_manifest(path)).items())
        except InterchangeError as error:
            raise self._damaged(str(error)) from error
        own = damage(path, files[dist.get_rank() :: dist.get_world_size()], checksums)
        every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own)
        if problems := [problem for part in every for problem in part]:
            raise self._damaged("\n  ".join(problems))
        entries = self._metadata.state_dict_metadata
        self._stored = {key: stored for stored, key in to_dialect(entries, "0.2.2").items()}
        self.entries = {key: entries[stored] for key, stored in self._stored.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Fills in ``state``: tensors, split ones too, are written into, other values replaced.

        Raises:
            CheckpointError: it cannot be read, and some of the tensors may have been written.
        """
        planner = SplittingLoadPlanner({self._stored[key]: value for key, value in state.items()})
        try:
            dcp.load(planner.state, storage_reader=_Reader(self.path, self._metadata), planner=planner)
        except CheckpointException as error:
            raise self._damaged(f"it cannot be read ({first_cause(error)})") from error
        state |= {key: planner.objects[self._stored[key]] for key in state if self._stored[key] in planner.objects}

    def _damaged(self, what: str) -> CheckpointError:
        earlier = previous(self.path)
        cure = "there is no complete one before it in that folder"
        if earlier is not None:
            cure = (
                f"{earlier} is the one before it: continue from there with checkpoint.load_step = "
                f"{earlier.name.removeprefix('step-')}, or from another folder's with checkpoint.initial_load_path = {earlier}"
            )
        return CheckpointError(f"{self.path} is damaged:\n  {what}\n{cure}")


class _Reader(FileSystemReader):
    """Takes the metadata that has been read already: its own reading would unpickle whatever is there."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
