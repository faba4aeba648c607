"""How many programs share work of which the device alone knows how much it is, such as the rows that hold data.

With a program a row, rows of a few KiB take longer to begin than to work on, and those past the data, for which there is room,
are as many programs again (docs/performance.md).
"""

import functools

import torch

MANY = 256  # to a multiprocessor, for whichever is free
FEW = 64  # where a program loads rows ahead
TOGETHER = 8  # that are on one at the same time


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def programs(parts: int, device: torch.device, of_multiprocessor: int = MANY) -> tuple[int]:
    """The grid of a kernel whose programs share the parts, at most so many: each of P takes every P-th, or the next."""
    return (min(parts, of_multiprocessor * multiprocessors(device)),)
