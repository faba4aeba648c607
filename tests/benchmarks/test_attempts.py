"""benchmarks/attempts.py: what failed or came too late, and why."""

import argparse
import time

import pytest
import torch

from benchmarks.attempts import Unable, attempt, chosen


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
