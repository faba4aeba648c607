"""Tests that need a GPU: where torch finds none, nothing is collected."""

from collections.abc import Callable, Iterator

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

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
