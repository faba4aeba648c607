"""What a measurement was made with: commit, hardware, versions."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "torchtitan", "torchao", "datasets", "transformers", "liger-kernel")


def commit() -> str:
    """The checked-out commit, marked where files differ from it; "unknown" outside of a git checkout."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty") or "unknown"


def hardware() -> list[str]:
    """One line per GPU as nvidia-smi names it, else the processor. Starts no CUDA context, which would take memory."""
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return gpus.splitlines() if gpus else [platform.processor() or platform.machine()]


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or "none"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def report(command: list[str], commit: str) -> dict[str, Any]:
    """How a benchmark's results begin."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": commit,
        "hardware": hardware(),
        "versions": versions(),
    }


def heading(report: dict[str, Any]) -> str:
    return f"{report['command']}\ncommit {report['commit']}\n{', '.join(report['hardware'])}\n{report['versions']}"


def _output(*command: str) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
