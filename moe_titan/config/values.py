"""What one value may be: its type, its range, and how it is read from the command line."""

import math
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from moe_titan.config.errors import did_you_mean, one_of, show


@dataclass(frozen=True)
class Rule:
    """A condition beyond the type; `allowed` completes the sentence "must be ..."."""

    allowed: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Rule:
    return Rule(f">= {low}", lambda value: value >= low)


def between(low: float, high: float, high_included: bool = True) -> Rule:
    return Rule(
        f"in [{low}, {high}{']' if high_included else ')'}",
        lambda value: low <= value < high or (high_included and value == high),
    )


def subset_of(*names: str) -> Rule:
    return Rule(f"a list drawn from {', '.join(map(show, names))}", lambda value: set(value) <= set(names))


POSITIVE = Rule("> 0", lambda value: value > 0)
NOT_EMPTY = Rule("a name that is not empty", bool)

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    list[str]: 'a list of strings, e.g. ["a", "b"] (on the command line: a,b)',
}


def type_name(kind: Any) -> str:
    """How `--help` and messages name a type."""
    if _is_optional(kind):
        return f"{type_name(_inner(kind))}, or none"
    if get_origin(kind) is Literal:
        return one_of(get_args(kind))
    return _NAMES[kind]


def check(value: Any, kind: Any, rule: Rule | None = None) -> Any:
    """Return `value` as type `kind` (an int becomes a float where a float is asked for, "none" becomes None).

    Raises:
        ValueError: the type or the range is wrong; the text says what is allowed.
    """
    if _is_optional(kind):
        return None if value in (None, "none") else check(value, _inner(kind), rule)
    if kind is float and type(value) is int:
        value = float(value)
    if not _has_type(value, kind):
        near = did_you_mean(value, get_args(kind)) if get_origin(kind) is Literal and isinstance(value, str) else ""
        raise ValueError(f"must be {type_name(kind)}{near}")
    if rule and not rule.holds(value):
        raise ValueError(f"must be {rule.allowed}")
    return value


def parse(text: str, kind: Any) -> Any:
    """Read a command-line value of type `kind`; text that does not fit is returned as it is, for `check` to refuse."""
    if _is_optional(kind):
        return None if text == "none" else parse(text, _inner(kind))
    try:
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if kind in (int, float):
            return kind(text)
        if kind == list[str]:
            return parse_toml(text) if text.startswith("[") else [item.strip() for item in text.split(",") if item]
    except ValueError:
        pass
    return text


def parse_toml(text: str) -> Any:
    """Read a value in TOML's spelling; anything that is not TOML is a string without its quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _has_type(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is kind and not (kind is float and not math.isfinite(value))


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _inner(kind: Any) -> Any:
    """X of X | None."""
    return next(arg for arg in get_args(kind) if arg is not type(None))
