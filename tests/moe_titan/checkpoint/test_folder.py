"""A run's folder: what counts, what is kept, and what is left when the process ends between any two operations."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_titan.checkpoint import CheckpointError, complete_steps, find_checkpoint
from moe_titan.checkpoint.folder import RunFolder, previous
from moe_titan.config import load_config

FILES = ("__0_0.distcp", "__1_0.distcp", "manifest.json", ".metadata")


def write(path: Path, content: str) -> None:
    path.mkdir(parents=True)
    for name in FILES:
        (path / name).write_text(content)


def contents(folder: Path) -> dict[int, set[str]]:
    """What the files of each complete step say."""
    return {step: {(folder / f"step-{step}" / name).read_text() for name in FILES} for step in complete_steps(folder)}


def commit(folder: RunFolder, step: int, content: str) -> None:
    write(folder.aside(step), content)
    folder.commit(step)


@pytest.mark.parametrize(
    ("latest", "every", "kept"),
    [(0, 0, {1, 2, 3, 4, 5, 6, 7}), (2, 0, {6, 7}), (2, 3, {3, 6, 7}), (3, 2, {2, 4, 5, 6, 7}), (0, 2, {1, 2, 3, 4, 5, 6, 7})],
)
def test_what_is_kept(tmp_path, latest, every, kept) -> None:
    folder = RunFolder(tmp_path, latest, every)
    for step in range(1, 8):
        commit(folder, step, f"step {step}")
        assert step in complete_steps(tmp_path)
    assert contents(tmp_path) == {step: {f"step {step}"} for step in kept}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}" for step in sorted(kept)]


class Killed(BaseException):
    pass


@pytest.fixture
def kill_after(monkeypatch):
    """Makes the process end before the n-th change of the folder from now on."""
    state = SimpleNamespace(left=-1)

    def counted(function):
        def change(*args, **kwargs):
            if state.left == 0:
                raise Killed
            state.left -= 1
            return function(*args, **kwargs)

        return change

    for module, name in ((Path, "rename"), (os, "unlink"), (os, "rmdir")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))

    def start(changes: int) -> None:
        state.left = changes

    return start


@pytest.mark.parametrize(
    ("older", "newest", "step", "before", "after"),
    [
        ((2, 4), 4, 6, {4}, {6}),
        # Saved again, and after going back: until it is complete, the branch that was left may still be the newest.
        ((2, 4, 6), 6, 6, {6, 4}, {6}),
        ((2, 4, 6, 8), 2, 4, {8, 6, 4, 2}, {4}),
        ((2, 4, 6, 8), 2, 10, {8, 6, 4, 2}, {10}),
    ],
)
def test_killed_between_any_two_changes(tmp_path, kill_after, older, newest, step, before, after) -> None:
    """No step is ever complete by name and torn inside, and at no moment is there none."""
    changes, finished = 0, False
    while not finished:
        path = tmp_path / str(changes)
        folder = RunFolder(path, keep_latest=2, keep_every=0, newest=newest)
        for old in older:
            write(folder.step(old), f"old {old}")
        write(folder.aside(step), f"new {step}")
        kill_after(changes)
        try:
            folder.commit(step)
            finished = True
        except Killed:
            pass
        kill_after(-1)
        found = contents(path)
        assert found and all(texts in ({f"old {s}"}, {f"new {s}"}) for s, texts in found.items()), f"after {changes} changes"
        assert max(found) in before | after
        folder.clean()
        whole = set(older) if newest >= step else {n for n in older if n <= newest}
        assert max(whole) in contents(path) or step in contents(path)
        assert not [p.name for p in path.iterdir() if p.name.startswith(".")]
        commit(folder, step, f"again {step}")
        assert max(contents(path)) == step and contents(path)[step] == {f"again {step}"}
        changes += 1
    assert max(found) in after and found[step] == {f"new {step}"}
    assert changes >= 5


def test_torchtitan_takes_no_other_name_for_a_step(tmp_path) -> None:
    from torchtitan.components.checkpoint import CheckpointManager

    folder = RunFolder(tmp_path, 0, 0)
    for step in (2, 4):
        commit(folder, step, "old")
    folder.newest = 2
    commit(folder, 3, "went back")
    write(folder.aside(9), "being written")
    assert (tmp_path / "abandoned-4").exists()
    assert CheckpointManager._find_load_step(SimpleNamespace(folder=str(tmp_path))) == 3
    assert previous(tmp_path / "step-3") == tmp_path / "step-2"
    assert previous(tmp_path / "step-2") is None


def test_going_back_loses_nothing(tmp_path) -> None:
    """Steps of the new branch with numbers of the old one's, beyond it, and going back a second time."""
    for steps, newest in (((3, 6, 9), 0), ((6, 9), 3), ((10,), 3)):
        folder = RunFolder(tmp_path, 0, 0, newest)
        for step in steps:
            commit(folder, step, f"after {newest}")
    assert complete_steps(tmp_path) == {3, 10}
    abandoned = {path.name: {file.read_text() for file in path.iterdir()} for path in tmp_path.glob("abandoned-*")}
    names = {f"abandoned-{step}": {"after 0"} for step in (6, 9)} | {f"abandoned-{step}.1": {"after 3"} for step in (6, 9)}
    assert abandoned == names


def config(folder: Path, *argv: str):
    common = ["--job.dump_folder", str(folder), "--model.name=qwen3", "--training.tokenizer=byte", "--checkpoint.enable"]
    return load_config([*common, *argv], 1)


def test_seed_checkpoints_are_models(tmp_path) -> None:
    write(tmp_path / "checkpoint" / "step-0", "seed")
    assert find_checkpoint(config(tmp_path)) == (tmp_path / "checkpoint" / "step-0", True)
    write(tmp_path / "checkpoint" / "step-5", "run")
    assert find_checkpoint(config(tmp_path)) == (tmp_path / "checkpoint" / "step-5", False)
    with pytest.raises(CheckpointError, match=r"create_seed_checkpoint = true: .* holds the steps \[0, 5\]"):
        find_checkpoint(config(tmp_path, "--checkpoint.create_seed_checkpoint"))


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path) -> None:
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(CheckpointError, match='checkpoint.folder = "checkpoint": .* can be written'):
        find_checkpoint(config(tmp_path))
    assert find_checkpoint(config(tmp_path, "--checkpoint.load_only")) is None
    shutil.rmtree(tmp_path)
    assert find_checkpoint(config(tmp_path)) is None
