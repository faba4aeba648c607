"""Runs a script of kernel cases in Triton's interpreter, which has to be chosen before Triton is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def errors_of(script: str) -> dict[str, float]:
    """What a script of tests/kernels prints: errors by case."""
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "kernels" / script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
