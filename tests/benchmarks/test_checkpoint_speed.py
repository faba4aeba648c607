"""benchmarks/checkpoint_speed.py on two tiny ranks: that every measurement is made and says something."""

import contextlib
import io
import json
import sys

import pytest
import trainer_runs
from trainer_runs import MODELS, arguments, layout
from workers import WorkerError

from benchmarks import checkpoint_speed
from moe_titan.checkpoint import Checkpointer


def measure(argv: list[str], load_nothing: bool = False) -> str:
    sys.argv = ["checkpoint_speed.py", *argv]
    if load_nothing:
        Checkpointer.load = lambda *_: None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        checkpoint_speed.main()
    return out.getvalue()


def arguments_of_run(tmp_path) -> list[str]:
    corpus = trainer_runs.write_corpus(tmp_path / "corpus")
    bf16 = {"training.mixed_precision_param": "bfloat16"}
    return arguments(corpus, tmp_path / "run", MODELS["deepseek"], layout(dps=2, ep=2), bf16)


def test_every_measurement_is_made(pool, tmp_path) -> None:
    first, second = pool.run(2, measure, arguments_of_run(tmp_path), group=False)
    measured = {record.pop("measured"): record for record in map(json.loads, first.splitlines())}
    assert list(measured) == [
        *(f"save, {mode}, {what}" for mode in checkpoint_speed.MODES for what in ("first", "second")),
        *("save", "load, checksums True", "load, checksums False"),
        *("plain file, written", "plain file, read", "torch.save, written", "torch.save, read"),
    ]
    assert measured["save"]["share_of_plain_file"] > 0 and measured["load, checksums True"]["share_of_torch.save"] > 0
    for name, record in measured.items():
        assert 0 < record["seconds"] < 30
        if name.startswith("save, "):
            assert record["gb"] > 0.0005 and 0 < record["pause_ms"] <= 1e3 * record["seconds"]
            assert ("disabled" in name) == (record["steps_meanwhile_ms"] == [])
    assert second == "" and not (tmp_path / "run" / "checkpoint").exists()


def test_what_is_loaded_is_looked_at(pool, tmp_path) -> None:
    with pytest.raises(WorkerError, match="what has been loaded is not what was saved"):
        pool.run(2, measure, ["--modes", "--rounds", "1", *arguments_of_run(tmp_path)], True, group=False)
