"""benchmarks/attempts.py: what failed or came too late, and why."""

import argparse
import json
import time
from functools import partial

import pytest
import torch

from benchmarks.attempts import Unable, attempt, chosen, measure_all, parse_options
from benchmarks.attention import CASES


def failing(error: Exception):
    def work() -> dict:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (Unable("documents"), "documents", "documents"),
        (torch.OutOfMemoryError("too much"), "memory", "memory: OutOfMemoryError: too much"),
        (ModuleNotFoundError("no liger"), "missing", "missing: ModuleNotFoundError: no liger"),
        (RuntimeError("No available kernel\nsee above"), "refused", "refused: RuntimeError: No available kernel"),
    ],
    ids=str,
)
def test_reasons(error, reason, said, capsys) -> None:
    entry = attempt("case", "run", failing(error), time.monotonic() + 60, str)
    assert (entry["case"], entry["run"], entry["reason"]) == ("case", "run", reason) and entry["seconds"] >= 0
    assert capsys.readouterr().out.startswith(f"case, run: {said} (")


def test_figures(capsys) -> None:
    entry = attempt("case", "run", lambda: {"ms": 2.0}, time.monotonic() + 60, lambda found: f"{found['ms']} ms")
    assert entry["reason"] is None and entry["ms"] == 2.0 and capsys.readouterr().out.startswith("case, run: 2.0 ms (")


def test_nothing_begins_late() -> None:
    assert attempt("case", "run", failing(AssertionError("has run")), time.monotonic() - 1, str)["reason"] == "late"


def test_names_and_their_beginnings() -> None:
    known = ["mla-4", "mla-1", "qwen3-4"]
    assert chosen("mla", known) == ["mla-4", "mla-1"] and chosen("qwen3-4,mla-1", known) == ["mla-1", "qwen3-4"]
    for unknown in ("gpt", ""):  # nothing is the beginning of every name
        with pytest.raises(argparse.ArgumentTypeError, match=f"unknown '{unknown}'; choose from mla-4, mla-1, qwen3-4"):
            chosen(f"mla,{unknown}", known)


def test_options(capsys) -> None:
    parse = partial(parse_options, name="attention", doc=None, cases=list(CASES))
    options = parse(["--cases", "mla-1x16384,qwen3-4x4096-d", "--commit", "abc"])
    assert options.cases == ["qwen3-4x4096-documents", "mla-1x16384", "mla-1x16384-documents"]
    assert len(parse(["--commit", "abc"]).cases) == len(CASES) == 8
    with pytest.raises(SystemExit, match="2"):
        parse(["--cases", "gpt"])
    assert "--cases: unknown 'gpt'; choose from qwen3-4x4096" in capsys.readouterr().err


@pytest.mark.parametrize(("lost", "code", "reasons"), [("peer", 0, [None, "wrong"]), ("ours", 1, ["wrong", None])])
def test_every_run_of_every_case(monkeypatch, tmp_path, capsys, lost, code, reasons) -> None:
    """Failures go by; those of ours are in the exit code. What has been measured is in the file."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("benchmarks.environment.report", lambda command, commit: {"command": command, "commit": commit})
    monkeypatch.setattr("benchmarks.environment.heading", lambda report: " ".join(report["command"]))

    def measure(problem: str, run: str) -> dict[str, str]:
        if (problem, run) == ("B", lost):
            raise Unable("wrong")
        return {"what": problem + run}

    argv = ["--commit", "abc", "--out", str(tmp_path)]
    assert measure_all(argv, "name", None, ["a", "b"], ["ours", "peer"], str.upper, measure, str, str) == code
    entries = json.loads((tmp_path / "name.json").read_text())["results"]
    assert [entry["run"] + entry["case"] for entry in entries] == ["oursa", "oursb", "peera", "peerb"]
    assert [entry.get("what") for entry in entries if entry["case"] == "a"] == ["Aours", "Apeer"]
    assert [entry["reason"] for entry in entries if entry["case"] == "b"] == reasons
    assert "python benchmarks/name.py --commit abc" in capsys.readouterr().out
