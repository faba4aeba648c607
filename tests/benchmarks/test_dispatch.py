"""Options and table of benchmarks/dispatch.py; what it measures needs two GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import dispatch

ROOT = Path(__file__).resolve().parents[2]
RATES = {"write 32 MiB": 350.0, "read 256 MiB": 400.0}


def entry(tokens: int, run: str, *us: float) -> dict:
    return {"tokens": tokens, "run": run, "payload": 40_000_000, "us": dict(zip(dispatch.PASSES, us, strict=True))}


def test_table() -> None:
    entries = [
        entry(8192, "nvlink transfers, 64 SMs", 125.0, 200.0, 100.0, 250.0),
        entry(8192, "nvlink whole", 100.0, 100.0, 150.0, 150.0),
        entry(8192, "alltoall whole", 300.0, 200.0, 250.0, 250.0),
    ]
    text = dispatch.table(entries, RATES)
    lines = text.splitlines()
    assert lines[0] == "peer copy: write 32 MiB 350 GB/s, read 256 MiB 400 GB/s"
    assert lines[2].split()[:3] == ["tokens", "MB", "run"]
    cells = "125 320 (80%) 200 200 (50%) 100 400 (100%) 250 160 (40%)"
    assert lines[3].split() == f"8192 40 nvlink transfers, 64 SMs {cells}".split()
    assert lines[-1] == "8192 tokens: alltoall over nvlink 2.50 x forward, 2.00 x with backward"
    assert len({len(line) for line in lines[2:6]}) == 1


def test_lines_of_fp8() -> None:
    common = {"tokens": 8192, "recipe": "blockwise", "bytes": {"fp8": 2112, "bf16": 4096}}
    us = {"to operand": 150.0, "to operand, bf16": 300.0}
    alone = {"alone": 100.4, "alone, bf16": 180.0}
    lines = dispatch.fp8_lines(
        [
            common | {"dispatcher": "nvlink", "us": us | alone, "same": True},
            common | {"dispatcher": "alltoall", "us": us, "same": False},
        ]
    )
    size = "blockwise: 2112 bytes a token (bf16 4096)"
    times = "to operand 150 us (bf16 300)"
    assert lines[0] == f"8192 tokens, nvlink, {size}, alone 100 us (bf16 180), {times}, same operand"
    assert lines[1] == f"8192 tokens, alltoall, {size}, {times}, BAD: another operand"


def test_options() -> None:
    options = dispatch.parse_options(["--tokens", "64,7", "--sms", "3", "--commit", "abc"])
    assert options.tokens == [64, 7] and options.sms == [3] and options.commit == "abc"
    assert not options.fp8 and dispatch.parse_options(["--fp8"]).fp8
    assert (options.width, options.experts, options.choices) == (2048, 128, 8)


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--tokens", "a"], ["--sms", ""], ["--token", "5,-5"]])
def test_wrong_options(argv, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        dispatch.parse_options(argv)
    assert stopped.value.code == 2 and argv[0] in capsys.readouterr().err


def test_one_process_is_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    command = [sys.executable, "benchmarks/dispatch.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "1 processes" in result.stderr and "torchrun --nproc-per-node 2" in result.stderr
