"""When a device comes to a point of its work, which the host may have reached long before."""

import time

import torch


class Moment:
    """The end of all that has been given to the current stream of ``device`` so far; on the CPU, which works at once, now."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: "Moment") -> float:
        """Waits for both."""
        if self._event is None or later._event is None:
            return later._time - self._time
        later.wait()
        return self._event.elapsed_time(later._event) / 1e3
