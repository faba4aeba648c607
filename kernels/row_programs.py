"""How many programs share the rows of a tensor, of which the device alone knows how many hold data.

With a program a row, rows of a few KiB take longer to begin than to work on, and those past the data, for which there is room,
are as many programs again (docs/performance.md).
"""

import functools

import torch

MANY = 256  # to a multiprocessor, for whichever is free
FEW = 64  # where a program loads rows ahead


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def row_programs(R: int, device: torch.device, of_multiprocessor: int = MANY) -> tuple[int]:
    """The grid of a kernel whose program p of P takes rows p, p + P, ... of R."""
    return (min(R, of_multiprocessor * _multiprocessors(device)),)
