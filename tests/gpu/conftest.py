"""Tests that need a GPU, some of them two: where torch finds fewer, or no
Hopper for its FP8, they are not collected."""

from collections.abc import Callable, Iterator

import pytest
import torch

collect_ignore_glob = {0: ["test_*.py"], 1: ["test_nvlink*.py"]}.get(torch.cuda.device_count(), [])
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    collect_ignore_glob.append("test_fp8_gpu.py")

# NaN as one fp32 and as two bf16 numbers, and as an index far out of range.
_POISON = 0x7FC07FC0


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> Iterator[Callable]:
    """``poisoned(function, *args)`` calls it after filling the memory that it is going to allocate with NaN."""

    def call(function: Callable, *args, **kwargs):
        torch.cuda.empty_cache()
        # The allocator cuts small and large tensors from different blocks.
        blocks = [torch.full((size,), _POISON, dtype=torch.int32, device="cuda") for size in [1 << 16] * 128 + [1 << 26]]
        del blocks
        return function(*args, **kwargs)

    yield call
    torch.cuda.empty_cache()
