"""benchmarks/cost.py at a small size on the CPU."""

import contextlib
import gc
import io
import json
import weakref
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import cost


def run(argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cost.main(argv)
    return out.getvalue()


def run_out_of_memory(argv: list[str]) -> tuple[str, int]:
    """With engines of more than 2 layers that do not fit. Also returns how many engines are left at the end."""
    engines, build = [], cost.build_engine

    def build_or_fail(config, args, *more, **named):
        engine = build(config, args, *more, **named)
        engines.append(weakref.ref(engine))
        if args.n_layers > 2:
            raise torch.OutOfMemoryError("tried to allocate")
        return engine

    with patch.object(cost, "build_engine", build_or_fail):
        printed = run(argv)
    gc.collect()
    return printed, sum(engine() is not None for engine in engines)


def arguments(tmp_path, *more: str) -> list[str]:
    return ["--tiny", "--warmup", "1", "--steps", "1", "--layers", "1", "--commit", "abc", "--out", str(tmp_path), *more]


def test_points_of_two_sweeps(pool, tmp_path):
    (printed,) = pool.run(1, run, arguments(tmp_path, "--points", "batch,experts"), group=False)
    report = json.loads((tmp_path / "cost.json").read_text())
    assert [point["batch"] for point in report["batch"]] == [1, 2, 4, 8]
    assert [point["experts"] for point in report["experts"]] == [32, 64, 128, 256]
    for point in [*report["batch"], *report["experts"]]:
        assert point["error"] is None and point["tokens_per_second"] > 0 and point["memory_gib"] > 0.1
    assert report["batch"][2] == report["experts"][2]  # the base, measured once
    assert printed.count("tokens/s") == 8
    charts = ElementTree.fromstring((tmp_path / "cost.svg").read_text())
    assert len(list(charts.iter("{http://www.w3.org/2000/svg}polyline"))) == 4


def test_points_that_do_not_fit_end_nothing(pool, tmp_path):
    ((printed, engines),) = pool.run(1, run_out_of_memory, arguments(tmp_path, "--points", "layers"), group=False)
    results = json.loads((tmp_path / "cost.json").read_text())["layers"]
    assert [point["error"] for point in results] == [None, None, "out of memory", "out of memory"]
    assert [point["tokens_per_second"] is None for point in results] == [False, False, True, True]
    assert printed.count("out of memory") == 2
    assert engines == 0


def test_no_point_begins_late(pool, tmp_path):
    (printed,) = pool.run(1, run, arguments(tmp_path, "--points", "sequence", "--seconds", "0"), group=False)
    assert printed.count("no time left") == 5
    assert {point["error"] for point in json.loads((tmp_path / "cost.json").read_text())["sequence"]} == {"no time left"}


def test_sequences_grow_at_the_same_tokens_a_step():
    found = cost.sweeps(4096, 2)
    assert list(found["sequence"]) == [4096, 8192, 16384, 32768, 65536]
    assert {point.seq_len * point.batch for point in found["sequence"].values()} == {65536}
    base = cost.Point(4096, 4, 128, 2)
    assert found["batch"][4] == found["experts"][128] == found["layers"][2] == base
    config = cost.configure(cost.Point(8192, 3, 64, 5), cost.parse_options(["--commit", "abc"]))
    assert (config.training.seq_len, config.training.local_batch_size) == (8192, 3)
    assert config.model.overrides == {"n_layers": 5, "moe_args.num_experts": 64} and config.model.flavor == "30B-A3B"
    assert not config.compile.enable and config.activation_checkpoint.mode == "none"


def test_unknown_sweep_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cost.parse_options(["--points", "batch,width"])
    assert "unknown width; choose from sequence, batch, experts, layers" in capsys.readouterr().err
