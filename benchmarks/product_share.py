"""Which matrix products a profiled step ran, by the type of their elements: python benchmarks/product_share.py TRACE.json[.gz].

Reads what torch's dispatcher was called with, not what a configuration asks for, also from compiled code. FLOPs are those of the
operands' sizes; where there is room for more rows than experts have on average, which --expert-rows says, that many count. The
attention core is left out.
"""

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

from benchmarks.trace_summary import read_events

# By operator: the places of its operands [.., K] and, of the second, the dimension that is not summed over. Ours that are grouped
# are of groups of rows, the first operand's first dimension, or its second one if both are turned.
PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm"), (0, 1, -1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), (1, 2, -1)),
    **dict.fromkeys(("moe_titan::grouped_mm", "moe_titan::grouped_mm_weight_grad"), (0, 1, -1)),
    "moe_titan::grouped_mm_fp8": (0, 2, -2),
    **dict.fromkeys(("moe_titan::grouped_mm_fp8_weight_grad", "moe_titan::mm_fp8_weight_grad"), (0, 2, 0)),
    "moe_titan::mm_fp8_weight_grad_": (1, 3, 0),
}


def flops_by_type(path: Path, expert_rows: float = math.inf) -> dict[str, float]:
    """FLOPs of the products in a trace's steps by the type of the first operand's elements, the largest first.

    Of grouped products at most ``expert_rows`` rows count.

    Raises:
        ValueError: the trace has no products with their sizes.
    """
    flops: Counter[str] = Counter()
    for event in _outermost(read_events(path)):
        first, second, kept = PRODUCTS[event["name"]]
        sizes, kinds = event["args"]["Input Dims"], event["args"]["Input type"]
        rows = 1.0
        if event["name"].startswith("moe_titan::grouped"):
            given = sizes[first][event["name"].endswith("fp8_weight_grad")]
            rows = min(1, expert_rows / given) if given else 1
        flops[kinds[first].removeprefix("c10::")] += 2 * math.prod(sizes[first]) * sizes[second][kept] * rows
    if not flops:
        raise ValueError(f"{path}: no matrix product with its sizes in this trace")
    return dict(flops.most_common())


def low_precision_share(path: Path, expert_rows: float = math.inf) -> float:
    """Share of the FLOPs whose operands have 8 bits or fewer."""
    flops = flops_by_type(path, expert_rows)
    return sum(count for kind, count in flops.items() if kind.startswith("Float8")) / sum(flops.values())


def report(path: Path, expert_rows: float = math.inf) -> str:
    flops = flops_by_type(path, expert_rows)
    total = sum(flops.values())
    parts = ", ".join(f"{kind} {count / total:.1%} ({count / 1e12:.3g} TFLOP)" for kind, count in flops.items())
    return f"matrix products that ran, by type of their elements: {parts}"


def _outermost(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Products with sizes that are no part of another one."""
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in PRODUCTS and "Input Dims" in event.get("args", {}):
            threads[event["tid"]].append(event)
    for calls in threads.values():
        end = -math.inf
        for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
            if event["ts"] >= end:
                end = event["ts"] + event["dur"]
                yield event


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--expert-rows", type=float, default=math.inf, help="that a rank's experts have on average")
    options = parser.parse_args()
    print(report(options.trace, options.expert_rows))
