"""The learning rate's course against the factor that torchtitan applies to an optimizer."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers

from moe_titan.lr_schedule import lr_factor


@dataclass
class Schedule:
    """torchtitan's section lr_scheduler."""

    warmup_steps: int
    decay_ratio: float | None
    decay_type: str
    min_lr_factor: float
    total_steps: int | None = None


@pytest.mark.parametrize("warmup_steps, decay_ratio", [*product([0, 1, 7, 30], [None, 0.0, 0.3, 0.77, 1.0])])
@pytest.mark.parametrize("decay_type, min_lr_factor", [*product(["linear", "sqrt", "cosine"], [0.0, 0.1])])
def test_matches_torchtitan(warmup_steps: int, decay_ratio: float | None, decay_type: str, min_lr_factor: float) -> None:
    total_steps = 23
    schedule = Schedule(warmup_steps, decay_ratio, decay_type, min_lr_factor)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    reference = build_lr_schedulers([optimizer], schedule, total_steps)
    for step in range(total_steps):
        ours = lr_factor(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            decay_ratio=decay_ratio,
            decay_type=decay_type,
            min_lr_factor=min_lr_factor,
        )
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15), step
        assert ours > 0
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("decay_ratio, after", [(None, 0.1), (0.5, 0.1), (0.0, 1.0)])
def test_stays_after_the_last_step(decay_ratio: float | None, after: float) -> None:
    factors = [
        lr_factor(step, total_steps=20, warmup_steps=5, decay_ratio=decay_ratio, decay_type="cosine", min_lr_factor=0.1)
        for step in (20, 21, 100)
    ]
    assert factors == pytest.approx([after] * 3)
