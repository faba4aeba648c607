"""Metadata that would run something is refused."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moe_titan.interchange import InterchangeError
from moe_titan.interchange.dcp import Checkpoint
from moe_titan.interchange.metadata import read_metadata


class Calls:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def test_equals_what_dcp_reads(tmp_path) -> None:
    state = {"a": torch.ones(3, 2, dtype=torch.bfloat16), "b": {"c": 3, "d": torch.ones((), dtype=torch.int64)}, "e": b"bytes"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = read_metadata(tmp_path), dcp.FileSystemReader(tmp_path).read_metadata()
    theirs.storage_meta.load_id = None
    assert ours == theirs


@pytest.mark.parametrize("function", [os.system, eval, torch.load, getattr], ids=lambda function: function.__name__)
def test_functions_are_refused(tmp_path, function) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Calls(function, f"touch {tmp_path}/ran", "x")))
    with pytest.raises(InterchangeError, match="which no checkpoint's metadata needs"):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_module_behind_an_allowed_one_is_refused(tmp_path) -> None:
    pickled = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93\x8c\x04true\x85R."
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(InterchangeError, match="filesystem.os.system"):
        read_metadata(tmp_path)


def test_another_pickle_is_refused(tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(InterchangeError, match="holds a dict"):
        read_metadata(tmp_path)


def test_objects_do_not_run(tmp_path) -> None:
    dcp.save({"train_state": {"step": Calls(os.system, f"touch {tmp_path}/ran")}}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(InterchangeError, match="train_state.step cannot be read"):
        Checkpoint(tmp_path).value("train_state.step")
    assert not (tmp_path / "ran").exists()
