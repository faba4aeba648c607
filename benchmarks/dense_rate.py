"""FLOP/s of one large bf16 product of random operands on the GPU, and nothing else: python benchmarks/dense_rate.py [SIZE]."""

import statistics
import sys

import torch


def dense_rate(size: int, calls: int = 20) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(calls + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / statistics.median(times[5:])


if __name__ == "__main__" and torch.cuda.is_available():
    print(dense_rate(int(sys.argv[1]) if len(sys.argv) > 1 else 8192))
