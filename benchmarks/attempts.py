"""Measurements of which each may fail, or begin too late, without taking the others along."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch


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
