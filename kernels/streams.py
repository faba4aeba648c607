"""Tensors that are kept for kernels on any stream."""

import torch
from torch import Tensor


def for_any_stream(x: Tensor) -> Tensor:
    """The tensor, once this stream has made it: the host waits, so that no other stream can read it before."""
    if x.is_cuda:
        made = torch.cuda.Event()
        made.record(torch.cuda.current_stream(x.device))
        made.synchronize()
    return x
