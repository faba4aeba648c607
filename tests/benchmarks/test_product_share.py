"""benchmarks/product_share.py on traces of known products, eager and compiled, and on one added up by hand."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.product_share import flops_by_type, low_precision_share, report


def traced(path, run):
    run()  # compiles
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_products_that_ran(backend, tmp_path):
    a, b, bias = torch.randn(32, 48).bfloat16(), torch.randn(64, 48).bfloat16(), torch.randn(64).bfloat16()
    low, scale = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), torch.ones(())

    def step(a, b, bias, x, y, scale):
        wide = a.float() @ b.float().t()
        narrow = torch._scaled_mm(x, y.t(), scale, scale, out_dtype=torch.bfloat16)
        return torch.addmm(bias, a, b.t()) + torch.relu(narrow), wide, torch.bmm(a.view(2, 16, 48), b.view(2, 48, 32))

    function = step if backend is None else torch.compile(step, backend=backend)
    path = traced(tmp_path / "trace.json", lambda: function(a, b, bias, *low, scale))
    one = 2 * 32 * 48 * 64
    assert flops_by_type(path) == {"BFloat16": one + one // 2, "float": one, "Float8_e4m3fn": one}
    assert low_precision_share(path) == pytest.approx(1 / 3.5)
    assert "BFloat16 42.9% (2.95e-07 TFLOP)" in report(path)


def call(name, sizes, kind, ts, dur=10, tid=1):
    kinds = [f"c10::{kind}" for _ in sizes]
    args = {"Input Dims": sizes, "Input type": kinds}
    return {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_grouped_products(tmp_path):
    R, W, E, N, K = 100, 384, 3, 64, 32
    low = "Float8_e4m3fn"
    events = [
        call("moe_titan::grouped_mm", [[R, K], [E, K, N], [E]], "BFloat16", 0),
        call("aten::_grouped_mm", [[N, R], [R, K]], "BFloat16", 20),
        call("aten::mm", [[N, R], [R, K]], "BFloat16", 21, dur=5),  # part of the one before
        call("aten::mm", [[N, R], [R, K]], "float", 21, dur=5, tid=2),
        call("moe_titan::grouped_mm_fp8", [[R, K], [1, R], [E, N, K], [E, 1, 1], [E]], low, 40),
        call("moe_titan::grouped_mm_fp8_weight_grad", [[N, W], [3, N], [K, W], [3, K], [E]], low, 60),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 80, "dur": 1, "tid": 1, "args": {}},
    ]
    of_all_rows = [
        call("moe_titan::mm_fp8_weight_grad", [[N, W], [3], [K, W], [3], [], []], low, 100),
        call("moe_titan::grouped_mm_fp8_weight_grad", [[N, W], [3], [K, W], [3], [2], []], low, 101, dur=5),  # part of it
        call("moe_titan::mm_fp8_weight_grad_", [[N, K], [N, W], [3], [K, W], [3], [], []], "Float8_e5m2", 120),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": of_all_rows}))
    assert flops_by_type(path, R / 2) == {low: 2 * N * W * K, "Float8_e5m2": 2 * N * W * K}
    path.write_text(json.dumps({"traceEvents": events}))
    one = 2 * R * N * K
    assert flops_by_type(path) == {low: one + 2 * N * W * K, "BFloat16": 2 * one, "float": one}
    half = flops_by_type(path, R / 2)
    assert half == {low: one, "BFloat16": 1.5 * one, "float": one}
    path.write_text(json.dumps({"traceEvents": events[-1:]}))
    with pytest.raises(ValueError, match="no matrix product"):
        flops_by_type(path)
