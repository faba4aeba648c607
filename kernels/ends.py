"""Ends of groups of rows that the host knows, as kernels want them: on the device, where each is made once."""

import functools

import torch
import triton
from torch import Tensor

from kernels.streams import for_any_stream


def equal_ends(length: int, end: int, device: torch.device) -> Tensor:
    """Multiples of ``length`` up to ``end``, which is the last: int32, at least one. It is not to be written to."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _equal_ends(length, end, device)  # a graph's own
    return _kept_ends(length, end, device)


def one_group(rows: int, device: torch.device) -> Tensor:
    return equal_ends(max(rows, 1), rows, device)


def _equal_ends(length: int, end: int, device: torch.device) -> Tensor:
    count = max(triton.cdiv(end, length), 1)
    return (torch.arange(1, count + 1, dtype=torch.int32, device=device) * length).clamp_(max=end)


@functools.lru_cache(4096)  # of numbers of rows that keep changing
def _kept_ends(length: int, end: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return for_any_stream(_equal_ends(length, end, device))
