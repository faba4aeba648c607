"""benchmarks/loss_curve.py at a small size on the CPU."""

import contextlib
import io
import json
import math
from xml.etree import ElementTree

import pytest

from benchmarks import loss_curve


def run(argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loss_curve.main(argv)
    return out.getvalue()


def test_three_runs_are_compared(pool, tmp_path):
    argv = ["--tiny", "--steps", "24", "--window", "4", "--commit", "abc", "--out", str(tmp_path)]
    (printed,) = pool.run(1, run, argv, group=False)
    report = json.loads((tmp_path / "loss_curve.json").read_text())
    curves = report["losses"]
    assert list(curves) == list(loss_curve.RUNS) and {len(curve) for curve in curves.values()} == {24}
    assert all(curve[-1] < curve[0] for curve in curves.values())
    # From the same weights on the same text the first step differs by rounding alone, from other weights by more.
    first, second, other = (curve[0] for curve in curves.values())
    assert 0 < abs(second - first) < 3e-3 < abs(other - second)
    assert first == pytest.approx(math.log(264), rel=0.15)
    assert report["differences"] == loss_curve.differences(curves, 4)
    assert f"bf16 to fp32: largest difference {report['differences']['bf16 to fp32']['largest']:.4f}" in printed
    ElementTree.fromstring((tmp_path / "loss_curve.svg").read_text())


def test_differences_are_those_of_window_means():
    curves = {
        "fp32": [4.0, 3.0, 2.0, 1.0],
        "bf16": [4.0, 3.5, 2.0, 0.5],
        "bf16, other weights": [5.0, 3.5, 2.0, 0.5],
    }
    assert loss_curve.smoothed(curves["fp32"], 2) == [3.5, 2.5, 1.5]
    found = loss_curve.differences(curves, 2)
    assert found["bf16 to fp32"] == pytest.approx({"largest": 0.25, "at_step": 2, "mean": 0.25})
    assert found["other weights"] == pytest.approx({"largest": 0.5, "at_step": 2, "mean": 0.5 / 3})


@pytest.mark.parametrize("steps, window, message", [("30", "31", "from 1 to --steps, 30"), ("19", "5", "at least 20")])
def test_steps_and_window_must_fit(steps, window, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        loss_curve.parse_options(["--steps", steps, "--window", window])
    assert message in capsys.readouterr().err
