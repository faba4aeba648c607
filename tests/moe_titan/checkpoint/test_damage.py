"""A checkpoint that is not as it was saved is named, and the one before offered; nothing that it holds is run."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint_runs
import pytest
import torch
import trainer_runs
from trainer_runs import MODELS, arguments, layout

from moe_titan.interchange.dcp import Checkpoint


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory) -> tuple[list[str], Path]:
    """Command line of a run on two ranks, and its folder with steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("damage")
    corpus = trainer_runs.write_corpus(folder / "corpus")
    argv = arguments(corpus, folder / "run", MODELS["deepseek"], layout(dps=2, ep=2), {"checkpoint.interval": 2})
    pool.run(2, trainer_runs.run, argv, group=False)
    return argv, folder / "run"


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {"cut": cut, "flip": flip, "missing": Path.unlink}
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json")
SAYS = {
    "cut": ["is cut off"] * 2 + ["/.metadata: cannot be read", "/manifest.json: cannot be read"],
    "flip": ["is damaged: its CRC-32"] * 2 + ["/.metadata", "is damaged:\n"],
    "missing": ["is missing"] * 2 + ["no complete checkpoint is there (no .metadata)", ""],
}


def damaged(run: Path, target: Path, kind: str, file: str, steps: tuple[int, ...] = (2, 4)) -> Path:
    """A copy of the run's checkpoints whose newest is damaged."""
    for step in steps:
        shutil.copytree(run / "checkpoint" / f"step-{step}", target / "checkpoint" / f"step-{step}")
    path = target / "checkpoint" / f"step-{steps[-1]}"
    DAMAGE[kind](path / file)
    return path


def test_every_kind_of_damage_is_named(pool, run, tmp_path) -> None:
    kinds = [(kind, file) for kind in DAMAGE for file in FILES]
    paths = [damaged(run[1], tmp_path / f"{kind} {file}", kind, file) for kind, file in kinds]
    sound = run[1] / "checkpoint" / "step-4"
    first, second = pool.run(2, checkpoint_runs.errors_of_loads, [*paths, sound])
    assert first == second
    assert first.pop() is None
    for (kind, file), path, error in zip(kinds, paths, first, strict=True):
        if (kind, file) == ("missing", "manifest.json"):
            assert error is None, "a checkpoint of torchtitan's has none"
            continue
        assert error is not None, (kind, file)
        assert f"{path} is damaged:\n  {path}" in error
        assert SAYS[kind][FILES.index(file)] in error
        # The manifest's own bits may stand for another file's sum.
        assert file in error or (kind, file) == ("flip", "manifest.json")
        assert "checkpoint.load_step = 2" in error and f"checkpoint.initial_load_path = {path.with_name('step-2')}" in error


def test_without_checksums_what_is_too_short_is_named(pool, run, tmp_path) -> None:
    paths = [damaged(run[1], tmp_path / kind, kind, "__1_0.distcp") for kind in DAMAGE]
    [errors] = pool.run(1, checkpoint_runs.errors_of_loads, paths, False)
    errors = dict(zip(DAMAGE, errors, strict=True))
    assert "is cut off" in errors["cut"] and "is missing" in errors["missing"]


def test_the_run_continues_from_the_one_before(pool, run, tmp_path) -> None:
    argv, folder = run
    path = damaged(folder, tmp_path, "flip", "__1_0.distcp")
    argv = [*argv, f"--job.dump_folder={tmp_path}"]
    for code, error, _ in pool.run(2, trainer_runs.main, argv, group=False):
        assert code == 2
        assert f"{path}/__1_0.distcp is damaged" in error and "checkpoint.load_step = 2" in error
    assert all(code == 0 for code, *_ in pool.run(2, trainer_runs.main, [*argv, "--checkpoint.load_step=2"], group=False))
    first, again = (Checkpoint(Path(f, "checkpoint", "step-6")) for f in (folder, tmp_path))
    for key in first.model_keys():
        torch.testing.assert_close(again.tensor(key).load(), first.tensor(key).load(), rtol=0, atol=0)


def test_the_only_one(pool, run, tmp_path) -> None:
    path = damaged(run[1], tmp_path, "cut", "__0_0.distcp", steps=(4,))
    [[error]] = pool.run(1, checkpoint_runs.errors_of_loads, [path])
    assert error.endswith("there is no complete one before it in that folder")


class Calls:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return os.system, self.arguments


def test_nothing_is_run(pool, tmp_path) -> None:
    """Neither from the metadata nor from an object, such as torchtitan's pickled position in the data."""
    command = Calls(f"touch {tmp_path}/ran")
    metadata, value = tmp_path / "step-1", tmp_path / "step-2"
    metadata.mkdir()
    (metadata / ".metadata").write_bytes(pickle.dumps(command))
    checkpoint_runs.save_plain(value, {"a": torch.ones(3), "train_state": {"step": command}})
    (tmp_path / "ran").unlink(missing_ok=True)
    [errors] = pool.run(1, checkpoint_runs.errors_of_loads, [metadata, value])
    assert "names posix.system" in errors[0]
    assert "it cannot be read" in errors[1] and "weights_only" in errors[1].lower() or "Weights only" in errors[1]
    assert not (tmp_path / "ran").exists()
