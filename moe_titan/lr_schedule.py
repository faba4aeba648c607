"""The learning rate's course over a run: warmup, stable phase, decay."""

import math
from collections.abc import Callable

_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
) -> float:
    """Factor on the base learning rate for one optimizer step (warmup-stable-decay, https://arxiv.org/abs/2404.06395).

    Linear warmup from `1 / warmup_steps` to 1, then 1, then decay towards `min_lr_factor`. The decay is laid out to
    reach its end one step after the last, so that every step trains. Where the phases do not fit into `total_steps`,
    the warmup is shortened to them and the decay to what the warmup leaves. The meaning is torchtitan 0.2.2's.

    Args:
        step: optimizer steps already taken, from 0.
        total_steps: steps that the schedule spans; from there on the factor stays as it is.
        decay_ratio: share of `total_steps` spent decaying; None starts the decay right after the warmup.
        decay_type: `linear`, `sqrt` or `cosine`.
        min_lr_factor: where the decay ends, as a share of the base learning rate.
    """
    warmup_steps = min(warmup_steps, total_steps)
    rest = total_steps - warmup_steps
    decay_steps = rest if decay_ratio is None else min(round(total_steps * decay_ratio), rest)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decayed = step - (total_steps - decay_steps)
    if decayed <= 0 or decay_steps == 0:
        return 1.0
    progress = min(decayed / decay_steps, 1.0)
    return min_lr_factor + (1 - min_lr_factor) * _DECAY[decay_type](progress)
