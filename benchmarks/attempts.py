"""Measurements of which each may fail, or begin too late, without taking the others along."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment

ROOT = Path(__file__).resolve().parents[1]


class Unable(Exception):
    """Why something cannot be measured, in one word."""


def attempt(
    case: str, run: str, work: Callable[[], dict[str, Any]], deadline: float, line: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """What ``work`` found, with ``case``, ``run`` and the seconds that it took; instead of figures a ``reason`` where it failed:
    "late" (not begun by ``deadline``, on the clock of ``time.monotonic``), "memory", "missing" (not installed), what
    :class:`Unable` says, or "refused" for any other error. Prints ``line`` of what was found, or the reason and
    the error's first line.
    """
    begin, found = time.monotonic(), {"reason": None}
    try:
        if begin > deadline:
            raise Unable("late")
        found |= work()
        said = line(found)
    except Exception as error:
        found["reason"] = _reason(error)
        said = found["reason"]
        if not isinstance(error, Unable):
            said += f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = time.monotonic() - begin
    print(f"{case}, {run}: {said} ({seconds:.1f} s)", flush=True)
    return {"case": case, "run": run, "seconds": seconds} | found


def _reason(error: Exception) -> str:
    if isinstance(error, Unable):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "memory"
    return "missing" if isinstance(error, ImportError) else "refused"


def chosen(text: str, known: list[str]) -> list[str]:
    """The known names that begin as one of those in ``text``, which commas part; for an option of a command line.

    Raises:
        argparse.ArgumentTypeError: one of those in ``text`` begins no name.
    """
    beginnings = text.split(",")
    if unknown := [each for each in beginnings if not each or not any(name.startswith(each) for name in known)]:
        named = ", ".join(map(repr, unknown))
        raise argparse.ArgumentTypeError(f"unknown {named}; choose from {', '.join(known)}, or how they begin")
    return [name for name in known if name.startswith(tuple(beginnings))]


def parse_options(argv: list[str], name: str, doc: str | None, cases: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        type=partial(chosen, known=cases),
        default=",".join(cases),
        help=f"drawn from {', '.join(cases)}, or how some of them begin",
    )
    parser.add_argument("--seconds", type=float, default=45, help="start no run later than this")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks" / name, help="folder for the results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    return parser.parse_args(argv)


def measure_all(
    argv: list[str],
    name: str,
    doc: str | None,
    cases: list[str],
    runs: list[str],
    prepare: Callable[[str], Any],
    measure: Callable[[Any, str], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
    table: Callable[[list[dict[str, Any]]], str],
) -> int:
    """A benchmark's ``main``: every run of every chosen case, all cases of a run before the next one; the exit code.

    Args:
        name: of the script in this folder, and of its results.
        prepare: what a case's runs share, given to ``measure`` with the run's name.
    """
    options = parse_options(argv, name, doc, cases)
    if not torch.cuda.is_available():
        print(f"benchmarks/{name}.py measures a GPU, and torch finds none", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    report = environment.report(["python", f"benchmarks/{name}.py", *argv], options.commit)
    print(f"{environment.heading(report)}\n", flush=True)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    problems, entries = {case: prepare(case) for case in options.cases}, []
    for run in runs:
        for case, problem in problems.items():
            entries.append(attempt(case, run, partial(measure, problem, run), deadline, line))
            (options.out / f"{name}.json").write_text(json.dumps(report | {"results": entries}, indent=1) + "\n")
    print(f"\n{table(entries)}")
    return int(any(entry["reason"] not in (None, "late") for entry in entries if entry["run"] == "ours"))
