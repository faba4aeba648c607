"""Transfers between ranks against loops over tokens and choices, and what happens when a rank does not come."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("implementation", ["reference", "kernels"])
def test_transfers(implementation) -> None:
    """Processes that share memory: 2, 3, 4 and 8 ranks, uneven and no tokens, tokens that are not routed, a hot rank."""
    script = str(Path(__file__).with_name("dispatch_cases.py"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    result = subprocess.run([sys.executable, script, implementation], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report) >= 6
    assert not {case: wrong[:3] for case, wrong in report.items() if wrong}
