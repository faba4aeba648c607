"""Saving at once and in the background: what is saved, when, and what happens if it cannot be."""

import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import checkpoint_runs
import pytest
import trainer_runs
from checkpoint_runs import assert_equal
from trainer_runs import MODELS, arguments, layout, records

from moe_titan.checkpoint import complete_steps
from moe_titan.interchange.dcp import Checkpoint
from moe_titan.interchange.dialects import to_dialect
from moe_titan.interchange.manifest import checksum, read_manifest

MODES = ["disabled", "async", "async_with_pinned_mem"]
ON_2 = layout(dps=2, ep=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return trainer_runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def straight(pool, corpus, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Six steps that are saved at once: the run's folder, and the states of its two ranks at the end."""
    folder = tmp_path_factory.mktemp("straight")
    ends = pool.run(2, trainer_runs.run, arguments(corpus, folder, MODELS["deepseek"], ON_2), group=False)
    return folder, [end for _, end in ends]


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_save_in_the_background_holds_what_was(pool, tmp_path, mode) -> None:
    for seen in pool.run(2, checkpoint_runs.save_in_background, tmp_path, mode):
        assert seen == {"writing": True, "complete": set(), "complete before the second": True}
    for step, value in ((1, 1.0), (2, 2.0)):
        checkpoint = Checkpoint(tmp_path / f"step-{step}")
        assert checkpoint.value("n") == step
        for rank in range(2):
            assert checkpoint.tensor(f"a.{rank}").load().unique().tolist() == [value]
            assert checkpoint.tensor(f"b.{rank}").load().tolist() == ([0, 2, 4] if step == 1 else [0, 0, 0])
            assert checkpoint.tensor(f"empty.{rank}").load().shape == (0, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", ["disk full", "permission"])
def test_a_save_that_fails_leaves_the_last_one(pool, mode, error) -> None:
    # A folder that another user can reach.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent, "checkpoint")
        folder.mkdir()
        for message, cause, steps, names in pool.run(2, checkpoint_runs.save_with_error, folder, mode, error):
            assert f"step 2 could not be saved as {folder}/step-2" in message
            what = "rank 1: OSError: [Errno 27] File too large" if error == "disk full" else "PermissionError: [Errno 13]"
            assert what in message
            assert "step 1 is complete, and this run continues from it" in message and "free space" in message
            assert cause == "None"
            assert steps == {1, 3}
            assert names == ["step-1"]


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_ends_the_run_at_the_next_step(pool, corpus, tmp_path, mode) -> None:
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], ON_2, {"checkpoint.interval": 2, "checkpoint.async_mode": mode})
    for message, step, steps in pool.run(2, checkpoint_runs.failing_background_run, argv, 4, group=False):
        assert "step 4 could not be saved" in message and "File too large" in message and "step 2 is complete" in message
        # In the background it comes up at a boundary, at the latest where the next save is due.
        assert step == 4 if mode == "disabled" else step in (5, 6)
        assert steps == {2}
    (start, _), _ = pool.run(2, trainer_runs.run, argv, group=False)
    assert start["progress"][0] == 2


def test_saved_in_the_background_resumes_bitwise(pool, corpus, straight, tmp_path) -> None:
    folder, expected = straight
    settings = {"checkpoint.async_mode": "async_with_pinned_mem", "checkpoint.interval": 1, "checkpoint.keep_latest_k": 0}
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], ON_2, settings)
    pool.run(2, trainer_runs.run, argv, group=False)
    assert complete_steps(tmp_path / "checkpoint") == {1, 2, 3, 4, 5, 6}
    for file in ("__0_0.distcp", "__1_0.distcp"):
        for step in (3, 6):
            saved, at_once = (checksum(f / "checkpoint" / f"step-{step}" / file) for f in (tmp_path, folder))
            assert saved == at_once
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    resumed = pool.run(2, trainer_runs.run, argv, group=False)
    for (start, end), whole in zip(resumed, expected, strict=True):
        assert start["progress"][0] == 3
        assert_equal(end, whole)


@pytest.mark.parametrize("more", [{}, {"moe.rebalance_interval": 1}], ids=["experts stay", "experts move"])
def test_nothing_changes_before_it_has_been_copied(pool, corpus, tmp_path, more) -> None:
    """Steps that are computed while the copy of the state before them is made."""
    common = {"checkpoint.interval": 1, "checkpoint.keep_latest_k": 0, "training.steps": 4} | more
    for mode, run in (("disabled", trainer_runs.run), ("async_with_pinned_mem", checkpoint_runs.run_with_late_copies)):
        argv = arguments(corpus, tmp_path / mode, MODELS["deepseek"], ON_2, common, {"checkpoint.async_mode": mode})
        pool.run(2, run, argv, group=False)
    for step in (1, 2, 3, 4):
        for file in ("__0_0.distcp", "__1_0.distcp"):
            sums = {mode: checksum(tmp_path / mode / "checkpoint" / f"step-{step}" / file) for mode in MODES[::2]}
            assert sums["disabled"] == sums["async_with_pinned_mem"], f"{file} of step {step}"


def _run_and_warnings(argv: list[str]) -> tuple[dict, int]:
    with patch("parallelisms.dispatch.capacity.logger.warning") as warning:
        return trainer_runs.run(argv)[1], warning.call_count


def test_a_checkpoint_of_a_step_that_was_repeated(pool, corpus, tmp_path) -> None:
    """In each step rows are left out at first; the step before a checkpoint is settled before it is saved."""
    runs = []
    for folder, factor in ((tmp_path / "unbounded", {}), (tmp_path / "bounded", {"moe.capacity_factor": 0.5})):
        argv = arguments(corpus, folder, MODELS["deepseek"], ON_2, {"moe.dispatcher": "nvlink"}, factor)
        runs.append((folder, pool.run(2, _run_and_warnings, argv, group=False)))
    (unbounded, expected), (bounded, ends) = runs
    for (end, warnings), (wanted, _) in zip(ends, expected, strict=True):
        assert warnings == 6
        assert_equal(end, wanted)
    for file in ("step-3/__0_0.distcp", "step-3/__1_0.distcp", "step-6/__0_0.distcp", "step-6/__1_0.distcp"):
        assert checksum(bounded / "checkpoint" / file) == checksum(unbounded / "checkpoint" / file)
    for key in ("step", "loss", "grad_norm", "tokens", "expert_load"):
        assert [record[key] for record in records(bounded)] == [record[key] for record in records(unbounded)]


@pytest.mark.parametrize("mode", MODES)
def test_split_weights_are_made_whole_one_at_a_time(pool, corpus, tmp_path, mode) -> None:
    """Neither a save nor a load holds a second copy of the weights; elsewhere resuming with them is compared bitwise."""
    settings = {"training.mixed_precision_param": "bfloat16", "checkpoint.async_mode": mode, "training.steps": 2}
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], settings, {"checkpoint.interval": 1})
    for _ in range(2):  # The second run loads.
        [(whole, most_at_once)] = pool.run(1, checkpoint_runs.most_made_at_once, argv, group=False)
        assert whole > 40
        assert most_at_once <= 2, "one that is written and the next"
        argv += ["--training.steps=3"]


def test_the_manifest_tells_layout_and_files(straight) -> None:
    path = straight[0] / "checkpoint" / "step-6"
    manifest = read_manifest(path)
    assert {dim: degree for dim, degree in manifest.layout.items() if degree > 1} == {"dp_shard": 2, "ep": 2}
    assert manifest.files == {name: checksum(path / name) for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")}


def test_the_newer_dialect(pool, corpus, straight, tmp_path) -> None:
    folder, expected = straight
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], ON_2, {"checkpoint.dialect": "0.3.0"})
    pool.run(2, trainer_runs.run, [*argv, "--training.steps=3", "--lr_scheduler.total_steps=6"], group=False)
    older, newer = (Checkpoint(f / "checkpoint" / "step-3") for f in (folder, tmp_path))
    assert (older.dialect, newer.dialect) == ("0.2.2", "0.3.0")
    assert set(newer.entries) == set(to_dialect(older.entries, "0.3.0").values())
    assert "layers.1.moe.routed_experts.inner_experts.w1_EFD" in newer.entries
    resumed = pool.run(2, trainer_runs.run, argv, group=False)
    for (start, end), whole in zip(resumed, expected, strict=True):
        assert start["progress"][0] == 3
        assert_equal(end, whole)


def test_by_the_clock(pool, corpus, tmp_path) -> None:
    settings = {"checkpoint.interval": 5, "checkpoint.interval_minutes": 2, "training.steps": 9, "checkpoint.keep_latest_k": 0}
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], layout(dps=2), settings)
    for steps in pool.run(2, checkpoint_runs.run_by_the_clock, argv, 1.0, group=False):
        # After a save of any kind the clock starts anew.
        assert steps == {2, 4, 5, 7, 9}


def test_seed_checkpoint(pool, corpus, straight, tmp_path) -> None:
    """The initial model, and a run that starts from it on another layout."""
    seed_3, two_steps = {"debug.seed": 3}, {"training.steps": 2}
    argv = [*arguments(corpus, tmp_path, MODELS["deepseek"], seed_3), "--checkpoint.create_seed_checkpoint"]
    assert pool.run(1, trainer_runs.main, argv, group=False)[0][0] == 0
    assert complete_steps(tmp_path / "checkpoint") == {0}
    code, error, _ = pool.run(1, trainer_runs.main, argv, group=False)[0]
    assert code == 2 and "holds the steps [0] of a run" in error
    argv = arguments(corpus, tmp_path / "no seed", MODELS["deepseek"], seed_3, two_steps)
    [(seeded, _)] = pool.run(1, trainer_runs.run, argv, group=False)
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], ON_2, two_steps)
    (start, _), _ = pool.run(2, trainer_runs.run, argv, group=False)
    assert_equal(start["parameters"], seeded["parameters"])
    assert start["progress"] == (0, 0, 0)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
