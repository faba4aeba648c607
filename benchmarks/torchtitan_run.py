"""A run of stock torchtitan 0.2.2 beside ours: its settings and its text made from ours, its numbers read from its log."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w
from torchtitan.config import JobConfig

from moe_titan.config import Config, to_toml
from moe_titan.data.corpora import TextFiles, stdlib_files

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Rank 0's lines of the launcher's output, in the wording of torchtitan's MetricsProcessor and of peer_torchtitan.py.
_STEP = re.compile(
    r"^\[rank0\]:.*step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*(?P<grad_norm>\S+)\s+"
    r"memory:\s*(?P<memory_reserved_gib>[\d.]+)GiB.*tps:\s*(?P<tokens_per_second>[\d,]+)\s"
)
_PEAK = re.compile(r"^\[rank0\]:.*peak memory allocated: ([\d.]+) GiB")


def torchtitan_toml(config: Config, corpus: Path) -> str:
    """torchtitan's TOML for the same run: every key of ours that it has, a flavor named after the number of layers
    (see peer_torchtitan.py), and a folder of JSON lines as its text."""
    table = _known(tomllib.loads(to_toml(config)), JobConfig)
    table["model"]["flavor"] += f"-{config.model.overrides['n_layers']}L"
    table["training"] |= {"dataset": "c4_test", "dataset_path": str(corpus)}
    return tomli_w.dumps(table)


def _known(table: dict[str, Any], section: type) -> dict[str, Any]:
    kinds = get_type_hints(section)
    return {
        key: _known(value, kinds[key]) if dataclasses.is_dataclass(kinds[key]) else value
        for key, value in table.items()
        if key in kinds
    }


def write_corpus(folder: Path, seed: int) -> None:
    """The standard library's source files as JSON lines, in the order of the first epoch of our own loader."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TextFiles(stdlib_files())
    documents = files.deal({0: (0, 0)}, num_streams=1, seed=seed)[0]
    with (folder / "stdlib.json").open("w") as out:
        for _ in range(len(files)):
            out.write(json.dumps({"text": next(documents).text}) + "\n")


def parse_log(log: str) -> tuple[list[dict[str, float]], float | None]:
    """Rank 0's logged steps, and the peak of allocated memory in GiB (None: the run did not get to its end).

    Each step has `step`, `loss`, `grad_norm`, `tokens_per_second` (per GPU, since the step logged before) and
    `memory_reserved_gib` (peak of what torch's allocator holds, more than what is allocated).
    """
    lines = _COLOR.sub("", log).splitlines()
    steps = [
        {key: float(value.replace(",", "")) for key, value in match.groupdict().items()}
        for match in map(_STEP.match, lines)
        if match
    ]
    peaks = [float(match[1]) for match in map(_PEAK.match, lines) if match]
    return steps, peaks[-1] if peaks else None
