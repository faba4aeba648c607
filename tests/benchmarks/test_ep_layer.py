"""benchmarks/ep_layer.py: options, table, and its numbers between two processes; what it times needs two GPUs."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.moe import utils as titan_utils

from benchmarks import ep_layer, moe_layer
from benchmarks.moe_layer import Shape
from benchmarks.moe_peers import torchtitan_layer

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(D=32, F=24, E=6, K=2, T=77)


def timed(run: str, load: str = "natural", forward: float = 1.0, backward: float = 2.0, **others) -> dict:
    times = {"forward_ms": forward, "backward_ms": backward, "forward_tflops": 309.2, "backward_tflops": 310.4}
    return {"shape": "qwen3", "load": load, "run": run, **times, "launches": [20, 30], "peak_bytes": 2**31} | others


def checked(**others) -> dict:
    found = {"errors": {"nvlink against fp64": {"y": 3e-3, "w2": 4e-3}}, "repeats_bitwise": {"nvlink": True}}
    place = {"shape": "qwen3", "load": "natural", "run": "check"}
    return place | found | {"graph_equals_eager": True, "waits_for_device": None} | others


def test_table() -> None:
    entries = [
        checked(),
        timed("nvlink"),
        timed("nvlink-graph", forward=0.5, backward=1.5, launches=[1]),
        timed("torchtitan", forward=4.0, backward=5.0),
        timed("torchtitan-compiled", forward=2.0, backward=4.0),
        timed("nvlink", load="all to one rank"),
        {"shape": "qwen3", "load": "all to one rank", "run": "torchtitan", "error": "OutOfMemoryError: no"},
    ]
    lines = ep_layer.table(entries).splitlines()
    assert len(lines) == len(entries) and len({len(line) for line in lines}) == 1
    assert lines[1].split() == "qwen3 natural nvlink 1.000 309 2.000 310 20 + 30 2,048 2.00".split()
    assert lines[2].split()[-3:] == ["1", "2,048", "3.00"]
    assert [line.split()[-1] for line in lines[3:]] == ["0.67", "1.00", "-", "-"]
    assert lines[-1].split()[-7:] == ["failed", *"------"]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"errors": {"nvlink against fp64": {"y": float("inf")}}}, "nvlink against fp64: {'y': inf}"),
        ({"repeats_bitwise": {"nvlink": True, "alltoall": False}}, "two runs of alltoall differ"),
        ({"graph_equals_eager": False}, "CUDA graph differs from eager"),
        ({"waits_for_device": "called a synchronizing operation"}, "nvlink waits for the device: called"),
        ({"error": "RuntimeError: x"}, "RuntimeError: x"),
    ],
)
def test_failed_checks_are_named(wrong, said) -> None:
    entry = checked(**wrong)
    assert len(ep_layer.failures(entry)) == 1
    assert ep_layer.details(entry).startswith("BAD qwen3, natural, check: ") and said in ep_layer.details(entry)


def test_details() -> None:
    assert ep_layer.details(checked()).startswith("ok  qwen3, natural, check: nvlink against fp64 y 3.0e-03, w2 4.0e-03; ")
    assert ep_layer.details(timed("nvlink")) == "ok  qwen3, natural, nvlink: 1.000 + 2.000 ms"
    assert ep_layer.details(timed("torchtitan", difference=4e-3)).endswith("differs from ours by 4.0e-03")


def test_options() -> None:
    options = ep_layer.parse_options(["--commit", "abc"])
    assert options.shapes == ["qwen3", "qwen3-32k"] and options.runs == list(ep_layer.RUNS) and not options.skew
    options = ep_layer.parse_options(["--shapes", "v3", "--runs", "nvlink,torchtitan", "--skew"])
    assert (options.shapes, options.runs, options.skew) == (["v3"], ["nvlink", "torchtitan"], True)


@pytest.mark.parametrize("argv", [["--shapes", "v9"], ["--runs", ""], ["--runs", "nvlink,deepep"]])
def test_wrong_options(argv, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        ep_layer.parse_options(argv)
    assert stopped.value.code == 2 and f"{argv[0]}: unknown" in capsys.readouterr().err


def test_one_process_is_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    command = [sys.executable, "benchmarks/ep_layer.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (
        result.returncode == 2 and "1 processes" in result.stderr and "--nproc-per-node 2 benchmarks/ep_layer.py" in result.stderr
    )


def _check(load: str) -> tuple[dict, int]:
    """The checks, and how many different experts this rank's tokens chose."""
    case = ep_layer.build(SMALL, load, "cpu")
    return ep_layer.check(case), len(moe_layer.chosen_experts(case.layer("nvlink"), case.x).unique())


@pytest.mark.parametrize("load, experts", [("natural", 6), ("half to one expert", 6), ("all to one rank", 3)])
def test_numbers(pool, load, experts) -> None:
    (found, chosen), other = pool.run(2, _check, load)
    assert (found, chosen) == other and chosen == experts
    assert found["repeats_bitwise"] == {"nvlink": True, "alltoall": True}
    assert list(found["errors"]) == ["nvlink against alltoall", "nvlink against fp64", "alltoall against fp64"]
    assert all(error < 1e-2 for each in found["errors"].values() for error in each.values())
    assert all(1e-4 < error for error in found["errors"]["nvlink against fp64"].values())


def _check_wrong_weights() -> dict[str, float]:
    case = ep_layer.build(SMALL, "natural", "cpu")
    layer = case.layer("nvlink")
    if dist.get_rank() == 1:
        layer.experts.w2 = torch.nn.Parameter(layer.experts.w2.detach().roll(1, 0))
    return ep_layer.worst(ep_layer.errors_against_fp64(case, layer))


def test_an_error_of_one_rank_is_seen_by_all(pool) -> None:
    for errors in pool.run(2, _check_wrong_weights):
        assert errors.pop("w2") < 1e-2  # w2's own gradient is the same for any w2
        assert min(errors.values()) > 0.1


@contextmanager
def titan_on_cpu():
    """torchtitan's own reference for its Triton kernel, and a count of integers, which torch.histc has on GPUs alone."""
    permute = partial(titan_utils.generate_permute_indices, use_cpu=True)
    with (
        patch.object(titan_utils, "generate_permute_indices", permute),
        patch.object(torch, "histc", lambda experts, bins, min, max: experts.bincount(minlength=bins)),
    ):
        yield


def _torchtitan(load: str) -> tuple[float, float]:
    """Differences of torchtitan's layer to ours."""
    case = ep_layer.build(SMALL, load, "cpu")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with torchtitan_layer(case.whole, mesh) as layer, titan_on_cpu():
        assert layer.experts.w1.to_local().shape[0] == SMALL.E // 2
        grad_x = torch.autograd.grad(layer(case.x), case.x, case.grad)[0]
        expected = torch.autograd.grad(case.layer("alltoall")(case.x), case.x, case.grad)[0]
        errors = ((grad_x - expected).norm(dim=-1) / expected.norm(dim=-1)).float()
        return ep_layer.difference(case, layer), errors.median().item()


@pytest.mark.parametrize("load", ep_layer.LOADS)
def test_torchtitan_has_the_same_weights(pool, load) -> None:
    for forward, backward in pool.run(2, _torchtitan, load):
        assert 0 < forward < 1e-2 and 0 < backward < 2e-2


def _main(folder: str, runs: str) -> tuple[int, str]:
    """The whole run but for the GPU's clock, profiler and allocator; its exit code, and what the rank printed."""

    def clock(call) -> float:
        call(), call()
        return 1000.0

    replaced = [
        patch.multiple(ep_layer.ranks, missing=lambda script: None, join=lambda: None, eager=clock),
        patch.multiple(ep_layer.moe_layer, kernels_of=lambda call: [("kernel", 1.0)] * 3, memory=lambda *inputs: (0, 2**20)),
        patch.multiple(ep_layer, build=partial(ep_layer.build, device="cpu"), check=lambda case: checked()),
        patch.dict(ep_layer.SHAPES, {"qwen3": SMALL}),
        titan_on_cpu(),
    ]
    with ExitStack() as stack, redirect_stdout(StringIO()) as printed:
        for replacement in replaced:
            stack.enter_context(replacement)
        code = ep_layer.main(["--shapes", "qwen3", "--runs", runs, "--out", f"{folder}/{dist.get_rank()}", "--commit", "abc"])
    return code, printed.getvalue()


def test_a_run(pool, tmp_path) -> None:
    (code, printed), (other_code, silence) = pool.run(2, _main, str(tmp_path), "torchtitan,nvlink")
    assert (code, other_code, silence) == (0, 0, "")
    head, *rows = [line.split() for line in printed.splitlines()[-3:]]
    assert head[:3] == ["shape", "load", "run"]
    rate = f"{6e-9 * SMALL.T * SMALL.K * SMALL.D * SMALL.F:.0f}"
    assert [row[2:] for row in rows] == [
        [run, "1.000", rate, "1.000", rate, "3", "+", "3", "1", "1.00"] for run in ("nvlink", "torchtitan")
    ]
    report = json.loads((tmp_path / "0/ep_layer.json").read_text())
    assert [entry["run"] for entry in report["results"]] == ["check", "nvlink", "torchtitan"] and report["commit"] == "abc"
    assert report["results"][1]["backward_tflops"] == 2 * report["results"][1]["forward_tflops"] > 0
    assert not (tmp_path / "1/ep_layer.json").exists()


def test_a_failed_run_fails_the_whole(pool, tmp_path) -> None:
    """On the CPU there are no CUDA graphs."""
    for code, printed in pool.run(2, _main, str(tmp_path), "nvlink-graph,nvlink"):
        assert code == 1
        assert not printed or ("BAD qwen3, natural, nvlink-graph: " in printed and "ok  qwen3, natural, nvlink: " in printed)
