"""GPU time by kind of kernel, from a torch.profiler trace: python benchmarks/trace_summary.py TRACE.json[.gz]."""

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first pattern found in a kernel's name, whatever its case, decides.
_KINDS = {
    "communication": "nccl|nvshmem|symm_mem",
    "dispatch": "^push_(tokens|sums)_kernel",
    "grouped GEMM": "grouped|groupproblemshape|ptrarray|^_weight_grad_",
    "attention": "flash|fmha|sdpa|attention|attn",
    "GEMM": "gemm|nvjet|cutlass|cublas|xmma|splitk",
    "optimizer, foreach": "adam|multi_tensor",
    "MoE kernels": "^_(route|split|logits_grad|gate_grad|count|place|spread_rows|gather_sum|forward|backward|partial)_kernel",
    "compiled": "triton_",
    "index, sort": "index|gather|scatter|sort|topk|scan|cumsum|histogram|searchsorted|embedding",
    "copy": "memcpy|memset|copy|catarray|fill",
    "elementwise, reduce": "elementwise|vectorized|reduce|softmax|norm",
}
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class TraceSummary:
    """Times in ms per profiled step. `busy` is when at least one kernel runs, `exposed_communication` the part of it
    when only communication does; kernels of several streams overlap, so that kinds may add up to more."""

    steps: int
    span: float
    busy: float
    exposed_communication: float
    by_kind: dict[str, float]
    by_name: dict[str, tuple[float, int]]  # time, launches in all steps

    @property
    def idle(self) -> float:
        """Share of the span."""
        return 1 - self.busy / self.span

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps, per step: {self.span:.1f} ms, GPU busy {self.busy:.1f} (idle {self.idle:.1%}), "
            f"communication alone {self.exposed_communication:.1f}"
        ]
        lines += [f"{time:9.1f} ms  {kind}" for kind, time in _largest(self.by_kind)]
        lines.append("kernels:")
        for name, (time, launches) in _largest(self.by_name)[:25]:
            lines.append(f"{time:9.1f} ms  x{launches:<5} {name[:110]}")
        return "\n".join(lines)


def summarize(path: Path) -> TraceSummary:
    """Sum up a trace in Chrome's format, as `torch.profiler` exports it.

    Raises:
        ValueError: no GPU activity in the trace.
    """
    events = read_events(path)
    # A host that runs ahead leaves kernels of the step before in the trace; their launches are not in it.
    launched = {event["args"]["correlation"] for event in events if event.get("cat") in _LAUNCHES}
    kernels = [event for event in events if event.get("cat") in _ON_GPU and event["args"]["correlation"] in launched]
    if not kernels:
        raise ValueError(f"{path}: no GPU kernel in this trace")
    marks = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    steps = max(len(marks), 1)

    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, list[float]] = defaultdict(list)
    for event in kernels:
        kinds[kind_of(event["name"])] += event["dur"]
        names[event["name"]].append(event["dur"])
    busy = _covered(kernels)
    computing = _covered(event for event in kernels if kind_of(event["name"]) != "communication")
    span = max(event["ts"] + event["dur"] for event in kernels) - min(event["ts"] for event in kernels)
    ms_per_step = 1e-3 / steps
    return TraceSummary(
        steps,
        span * ms_per_step,
        busy * ms_per_step,
        (busy - computing) * ms_per_step,
        {kind: time * ms_per_step for kind, time in kinds.items()},
        {name: (sum(times) * ms_per_step, len(times)) for name, times in names.items()},
    )


def read_events(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)["traceEvents"]


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name.lower())), "other")


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Time in us during which at least one of the events lasts."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        covered += max(stop - max(start, end), 0)
        end = max(end, stop)
    return covered


def _largest(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(table.items(), key=lambda item: item[1], reverse=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    print(summarize(parser.parse_args().trace))
