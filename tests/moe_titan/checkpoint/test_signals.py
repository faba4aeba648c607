"""SIGTERM and SIGUSR1, sent to one rank, save at the same step on all."""

import signal
from pathlib import Path

import checkpoint_runs
import pytest
import trainer_runs
from checkpoint_runs import assert_equal
from trainer_runs import MODELS, arguments, layout, records

MANY = {"checkpoint.interval": 100, "checkpoint.keep_latest_k": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return trainer_runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_sigterm_saves_and_ends(pool, corpus, tmp_path, mode) -> None:
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], layout(dps=2, ep=2), MANY, {"checkpoint.async_mode": mode})
    for step, _, steps in pool.run(2, checkpoint_runs.signalled_run, argv, signal.SIGTERM, 3, group=False):
        assert step == 3 and steps == {3}
    resumed = pool.run(2, checkpoint_runs.signalled_run, argv, None, 0, group=False)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    straight = [*argv, f"--job.dump_folder={tmp_path / 'straight'}"]
    for (step, end, steps), (_, whole, _) in zip(
        resumed, pool.run(2, checkpoint_runs.signalled_run, straight, None, 0, group=False), strict=True
    ):
        assert step == 6 and steps == {3, 6}
        assert_equal(end, whole)


def test_sigusr1_saves_and_goes_on(pool, corpus, tmp_path) -> None:
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], layout(dps=2), MANY)
    for step, _, steps in pool.run(2, checkpoint_runs.signalled_run, argv, signal.SIGUSR1, 3, group=False):
        assert step == 6 and steps == {3, 6}


def test_exit_code(pool, corpus, tmp_path) -> None:
    """0: the run did what it was told."""
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], {"training.steps": 10_000})
    [(code, error, _)] = pool.run(1, checkpoint_runs.main_with_sigterm, argv, group=False)
    assert code == 0 and error == ""
    assert 1 <= records(tmp_path)[-1]["step"] < 10_000
