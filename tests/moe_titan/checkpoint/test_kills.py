"""Some kills of what ``kill_runs.py`` does many times."""

import kill_runs
import pytest
import trainer_runs


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_run_continues_from_its_newest_complete_step(pool, tmp_path, mode) -> None:
    corpus = trainer_runs.write_corpus(tmp_path / "corpus")
    report = kill_runs.kill_again_and_again(pool, corpus, tmp_path / "killed", mode, kills=3, seed=1)
    assert [start for _, start in report.starts] == [newest for newest, _ in report.starts]
    assert len(report.starts) == 3
    assert report.sums == kill_runs.uninterrupted(pool, corpus, tmp_path / "straight", set(report.sums))
