"""From a TOML file and the command line to a checked Config."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_titan.config.errors import ConfigError, nearest_or_all, show
from moe_titan.config.help import help_text
from moe_titan.config.model_args import build_model_args
from moe_titan.config.sections import KEYS, OVERRIDES, Config
from moe_titan.config.unsupported import REFUSED, WITHOUT_EFFECT
from moe_titan.config.validate import resolve, validate
from moe_titan.config.values import check, parse, parse_toml

COMMAND_LINE = "command line"
_ALL_NAMES = [*KEYS, *REFUSED, *WITHOUT_EFFECT, OVERRIDES]
_SECTIONS = {name[:end] for name in _ALL_NAMES for end in range(len(name)) if name[end] == "."} | {OVERRIDES}


class Entry(NamedTuple):
    """One setting as found: a value of TOML's type, or the text after a flag (None for a flag that stands alone)."""

    source: str
    name: str
    value: Any


def load_config(argv: Sequence[str], world_size: int) -> Config:
    """Read, check and resolve the configuration of a run. Prints the help and exits with 0 when asked for `--help`.

    Args:
        argv: the command line without the program's name; it wins over the TOML file, which wins over the defaults.
        world_size: number of processes in the run.

    Returns:
        The configuration, with `data_parallel_shard_degree` and `global_batch_size` resolved where they were -1.

    Raises:
        ConfigError: one line per problem, each with the source, key, value, what is allowed and the cure.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        raise SystemExit(0)
    flags = list(_read_flags(argv))
    files = [entry for entry in flags if entry.name == "job.config_file" and entry.value]
    entries = [*(_read_toml(files[-1].value) if files else ()), *flags]

    config = Config()
    problems = [problem for entry in entries if (problem := _apply(config, entry))]
    if problems:
        raise ConfigError("\n".join(problems))
    resolve(config, world_size)
    if problems := validate(config, build_model_args(config), world_size):
        raise ConfigError("\n".join(problems))
    return config


def _read_flags(argv: Sequence[str]) -> Iterator[Entry]:
    """`--section.key value`, `--section.key=value` and `--section.switch`, in the order given."""
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"{COMMAND_LINE}: {flag}: expected --section.key value; write lists as a,b")
        name, equals, text = flag.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        yield Entry(COMMAND_LINE, "job.config_file" if name == "config" else name, value)


def _read_toml(path: str) -> Iterator[Entry]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f'{COMMAND_LINE}: --config = "{path}": cannot be read ({error.strerror}); '
            f"give a TOML file, as an absolute path or relative to {Path.cwd()}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for name, value in _flatten(table):
        yield Entry(path, name, value)


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and (value or prefix + name in _SECTIONS):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _apply(config: Config, entry: Entry) -> str | None:
    """Set one key. Returns what is wrong with the entry, if anything is."""
    source, name, value = entry
    try:
        if name.startswith(OVERRIDES + "."):
            config.set(name, _typed(entry, None), source)
        elif name in KEYS:
            key = KEYS[name]
            value = _typed(entry, key.kind)
            config.set(name, check(value, key.kind, key.rule), source)
        elif name in REFUSED:
            default, cure = REFUSED[name]
            value = _typed(entry, _kind_of(default))
            if type(value) is not type(default) or value != default:
                raise ValueError(f"not supported; only {show(default)} is accepted; {cure}")
        elif name not in WITHOUT_EFFECT:
            raise ValueError(_unknown(name))
    except ValueError as error:
        return f"{source}: {name} = {show(value)}: {error}"
    return None


def _typed(entry: Entry, kind: Any) -> Any:
    """The value of an entry; text from the command line is read as `kind`, or in TOML's spelling where that is None."""
    if entry.source != COMMAND_LINE:
        return entry.value
    if entry.value is None:
        if kind is bool:
            return True
        raise ValueError(f"a value must follow --{entry.name}")
    return parse_toml(entry.value) if kind is None else parse(entry.value, kind)


def _kind_of(default: Any) -> Any:
    return str | None if default is None else list[str] if isinstance(default, list) else type(default)


def _unknown(name: str) -> str:
    section, _, leaf = name.rpartition(".")
    if name in _SECTIONS:
        return f"is a section; write [{name}] with keys below it, or --{name}.key value"
    if section not in _SECTIONS | {""}:
        return f"unknown section [{section}]{nearest_or_all(section, sorted(_SECTIONS))}"
    if elsewhere := [known for known in KEYS if known.endswith(f".{leaf}")]:
        near = f"; did you mean {elsewhere[0]}?"
    elif section:
        near = nearest_or_all(leaf, [known.rpartition(".")[2] for known in _ALL_NAMES if known.startswith(f"{section}.")])
    else:
        near = nearest_or_all(leaf, ["config", "help", *sorted(known for known in _SECTIONS if "." not in known)])
    return f"unknown key{f' in [{section}]' if section else ''}{near}"
