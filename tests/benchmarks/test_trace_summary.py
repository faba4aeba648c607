"""benchmarks/trace_summary.py on a trace small enough to add up by hand."""

import gzip
import json

import pytest

from benchmarks.trace_summary import kind_of, summarize


def event(name, start, duration, category="kernel", launch=7):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"correlation": launch}}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("ProfilerStep#48", 0, 2000, "user_annotation"),
    event("ProfilerStep#49", 2000, 2000, "user_annotation"),
    event("ProfilerStep#49", 2000, 1900, "gpu_user_annotation"),
    event("aten::mm", 0, 500, "cpu_op"),
    event("cudaLaunchKernel", 10, 5, "cuda_runtime"),
    event("of_the_step_before", 0, 90, launch=6),
    event("nvjet_tst_128x256_64x4", 100, 1000),
    event("ncclDevKernel_SendRecv", 600, 1000),  # 500 of it beside the product before
    event("Memcpy DtoD (Device -> Device)", 1600, 200, "gpu_memcpy"),
    event("nvjet_tst_128x256_64x4", 3000, 1000),
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_times_are_per_step(name, tmp_path):
    path = tmp_path / name
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        json.dump({"traceEvents": EVENTS}, file)
    summary = summarize(path)
    assert summary.steps == 2
    assert summary.span == pytest.approx(3.9 / 2)
    assert summary.busy == pytest.approx(2.7 / 2)
    assert summary.exposed_communication == pytest.approx(0.5 / 2)
    assert summary.by_kind == pytest.approx({"GEMM": 1.0, "communication": 0.5, "copy": 0.1})
    assert summary.by_name["nvjet_tst_128x256_64x4"] == (pytest.approx(1.0), 2)
    lines = str(summary).splitlines()
    assert lines[0].startswith("2 steps") and [line.split()[-1] for line in lines[1:4]] == ["GEMM", "communication", "copy"]
    assert "x2" in lines[5]


def test_trace_without_gpu(tmp_path):
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": EVENTS[1:2]}))
    with pytest.raises(ValueError, match="no GPU kernel"):
        summarize(tmp_path / "cpu.json")


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<>>>", "grouped GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("_attention_value_grad_kernel", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "GEMM"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer, foreach"),
        ("_gather_sum_kernel", "MoE kernels"),
        ("triton_poi_fused_mul_silu_2", "compiled"),
        ("void at::native::index_elementwise_kernel<128, 4>", "index, sort"),
        ("Memset (Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise, reduce"),
        ("something_new", "other"),
    ],
)
def test_kind_of_a_kernel(name, kind):
    assert kind_of(name) == kind
