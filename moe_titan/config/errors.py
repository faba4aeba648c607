"""The one exception for wrong input, and how a message names a near miss."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class ConfigError(Exception):
    """Wrong input. The message has one line per problem: source, key, value, what is allowed, and the cure."""


def show(value: Any) -> str:
    """`value` as it is written in TOML and on the command line (`none` for None, which TOML lacks)."""
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for the candidate nearest to `name`, whatever its case; nothing where none is near."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def nearest_or_all(name: str, candidates: Iterable[str]) -> str:
    """As `did_you_mean`, but all candidates where none is near."""
    candidates = list(candidates)
    return did_you_mean(name, candidates) or f"; known: {', '.join(candidates)}"


def one_of(choices: Iterable[str]) -> str:
    """The choices in quotes, as they follow "must be"."""
    shown = [show(choice) for choice in choices]
    return f"one of {', '.join(shown)}" if len(shown) > 1 else shown[0]
