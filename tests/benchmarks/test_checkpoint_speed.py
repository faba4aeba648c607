"""benchmarks/checkpoint_speed.py on two tiny ranks: that every measurement is made and says something."""

import contextlib
import io
import json
import sys

import trainer_runs
from trainer_runs import MODELS, arguments, layout

from benchmarks import checkpoint_speed


def measure(argv: list[str]) -> str:
    sys.argv = ["checkpoint_speed.py", *argv]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        checkpoint_speed.main()
    return out.getvalue()


def test_every_measurement_is_made(pool, tmp_path) -> None:
    corpus = trainer_runs.write_corpus(tmp_path / "corpus")
    argv = arguments(corpus, tmp_path / "run", MODELS["deepseek"], layout(dps=2, ep=2))
    first, second = pool.run(2, measure, argv, group=False)
    measured = {record.pop("measured"): record for record in map(json.loads, first.splitlines())}
    assert list(measured) == [
        "plain step",
        "save",
        "write and fsync",
        "torch.save and fsync",
        "load, checksums True",
        "load, checksums False",
        *(f"{mode}, {what}" for mode in checkpoint_speed.MODES for what in ("first", "second")),
    ]
    assert measured["save"]["gb"] > 0.0005
    assert all(0 < record.get("pause", record.get("seconds")) < 30 for record in measured.values())
    assert second == "" and not (tmp_path / "run" / "checkpoint").exists()
