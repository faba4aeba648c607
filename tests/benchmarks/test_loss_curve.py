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
        assert loss_curve.main(argv) == 0
    return out.getvalue()


def test_runs_in_pieces_are_compared(pool, tmp_path):
    argv = ["--tiny", "--steps", "20", "--window", "4", "--commit", "abc", "--out", str(tmp_path)]
    pool.run(1, run, [*argv, "--runs", "bf16"], group=False)
    written = (tmp_path / "runs" / "bf16-0.json").stat().st_mtime_ns
    (tmp_path / "runs" / "nvfp4-0.json").write_text(json.dumps({"settings": {"steps": 5}}))  # of another comparison
    (printed,) = pool.run(1, run, [*argv, "--runs", "bf16,nvfp4,fp32", "--seeds", "0"], group=False)
    assert (tmp_path / "runs" / "bf16-0.json").stat().st_mtime_ns == written  # not trained again
    report = json.loads((tmp_path / "loss_curve.json").read_text())
    curves = loss_curve.curves_of(report["runs"])
    assert {name: list(seeds) for name, seeds in curves.items()} == {"fp32": [0], "bf16": [0, 1], "nvfp4": [0]}
    losses = [losses for seeds in curves.values() for losses in seeds.values()]
    assert all(len(curve) == 20 and sum(curve[-5:]) < sum(curve[:5]) for curve in losses)
    # From the same weights on the same text the first step differs by rounding alone, from other weights by more.
    exact, first, other, low = (curve[0] for curve in losses)
    assert 0 < abs(exact - first) < 3e-3 < abs(other - first) and 0 < abs(low - first) < 2e-2
    assert first == pytest.approx(math.log(264), rel=0.15)
    found = loss_curve.summary(curves, "bf16", 4)
    assert json.loads(json.dumps(found)) == report["summary"] and loss_curve.table(found, "bf16") in printed
    ElementTree.fromstring((tmp_path / "loss_curve.svg").read_text())


def test_differences_are_those_of_window_means():
    bf16 = {0: [4.0, 3.0, 2.0, 1.0], 1: [5.0, 3.5, 2.0, 0.5]}
    low = {0: [4.0, 3.5, 2.0, 0.5], 1: [5.0, 3.5, 2.0, 1.5]}
    assert loss_curve.smoothed(bf16[0], 2) == [3.5, 2.5, 1.5]
    found = loss_curve.summary({"bf16": bf16, "nvfp4": low}, "bf16", 2)
    assert found["bf16"] == {"final": {0: 1.5, 1: 1.25}, "seed_spread": 0.25}
    assert found["nvfp4"]["final"] == {0: 1.25, 1: 1.75} and found["nvfp4"]["seed_spread"] == 0.5
    assert found["nvfp4"]["difference"] == {0: -0.25, 1: 0.5}
    assert (found["nvfp4"]["mean_difference"], found["nvfp4"]["largest_difference"]) == (0.125, 0.5)
    loss, differences = loss_curve.charts({"bf16": bf16, "nvfp4": low}, "bf16", 2)
    assert loss.lines["nvfp4"] == [(2.0, 3.75), (3.0, 2.75), (4.0, 1.25)]
    assert differences.lines["nvfp4, seed 1"] == [(2.0, 0.0), (3.0, 0.0), (4.0, 0.5)]
    assert differences.lines["bf16, seed 0 to 1"] == [(2.0, -0.75), (3.0, -0.25), (4.0, 0.25)]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--steps", "30", "--window", "31"], "from 1 to --steps, 30"),
        (["--steps", "19", "--window", "5"], "at least 20"),
        (["--runs", "bf16,fp4"], "unknown fp4"),
    ],
)
def test_wrong_options_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        loss_curve.parse_options(flags)
    assert message in capsys.readouterr().err


def test_what_the_machine_lacks_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loss_curve.torch.cuda, "is_available", lambda: False)
    assert loss_curve.main(["--tiny", "--runs", "rowwise", "--out", str(tmp_path)]) == 2
    assert "set float8.emulate = true" in capsys.readouterr().err
