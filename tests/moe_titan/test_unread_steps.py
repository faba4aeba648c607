"""Steps whose rows did not fit, found out about late: the run is bitwise the one with room for all."""

import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import tiny
import torch
from layout_runs import CLIPPED, shard_digests
from torch.utils._python_dispatch import TorchDispatchMode

from moe_titan.engine import Engine
from moe_titan.optimizer import NonFiniteGradient
from moe_titan.unread_steps import MOST
from parallelisms.folded_mesh import Layout
from parallelisms.sharding_plan import local

LAYOUT, SAMPLES, STEPS = Layout(dp_shard=2, ep=2), 8, 5
OPTIONS = {"dispatcher": "nvlink", "dispatch_tokens": SAMPLES // 4 * tiny.SEQ, "dispatch_sms": 3}


def _batches(engine: Engine, step: int) -> list:
    return tiny.share(tiny.padded_batch(step, SAMPLES), engine.mesh.data_rank, LAYOUT.dp, 2)


def _engine(tight: set[int] | None) -> tuple[Engine, list[int], Callable]:
    """Rows fit in all steps but the ``tight`` ones; None leaves them unbounded.

    Returns also a list that gets the step of each pass, and a function that launches a step.
    """
    engine = tiny.build(tiny.deepseek(), LAYOUT, CLIPPED, **OPTIONS, capacity_factor=None if tight is None else 2.0)
    train_on, passes, running = engine._train_on, [], {}

    def run(micro_batches, denominator):
        step = running[micro_batches[0].labels_BS.data_ptr()]
        passes.append(step)
        if engine.capacity.bounded:
            engine.capacity._factor = 0.5 if step in tight else 2.0
        return train_on(micro_batches, denominator)

    def launch(step: int):
        batches = _batches(engine, step)
        running[batches[0].labels_BS.data_ptr()] = step
        return engine.step(batches, lr=1e-2 / (1 + step))

    engine._train_on = run
    return engine, passes, launch


def _numbers(result) -> tuple:
    load = {layer: counts.tolist() for layer, counts in result.expert_load.items()}
    return result.loss, result.grad_norm, result.tokens, load


def _state(engine: Engine) -> tuple[dict, list[float]]:
    return shard_digests(engine), [count.item() for _, count in engine.optimizer.step_counts()]


def _train(tight: set[int] | None, ahead: int) -> tuple[list, tuple, list[int], int]:
    """Reads each step when ``ahead`` more have been launched. Results, state, passes and warnings."""
    engine, passes, launch = _engine(tight)
    unread, numbers = [], []
    with patch("parallelisms.dispatch.capacity.logger.warning") as warning:
        for step in range(STEPS):
            unread.append(launch(step))
            if len(unread) > ahead:
                numbers.append(_numbers(unread.pop(0)))
        numbers += map(_numbers, unread)
    return numbers, _state(engine), passes, warning.call_count


@pytest.fixture(scope="module")
def unbounded(pool):
    return pool.run(2, _train, None, 1)


@pytest.mark.parametrize(
    ("tight", "ahead", "passes"),
    [
        (set(), 1, [0, 1, 2, 3, 4]),
        ({1}, 1, [0, 1, 2, 1, 2, 3, 4]),
        ({1, 2}, 1, [0, 1, 2, 1, 2, 3, 2, 3, 4]),
        ({0, 4}, 0, [0, 0, 1, 2, 3, 4, 4]),
        ({4}, 1, [0, 1, 2, 3, 4, 4]),
        ({1, 3}, STEPS, [0, 1, 2, 3, 4, 1, 2, 3, 4, 3, 4]),
        ({0}, STEPS, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_run_is_the_one_with_room_for_all(pool, unbounded, tight, ahead, passes) -> None:
    for found, expected in zip(pool.run(2, _train, tight, ahead), unbounded, strict=True):
        assert found[:2] == expected[:2]
        assert found[2:] == (passes, len(tight))


def _read_backwards(tight: set[int] | None) -> list:
    """The last step is read first, and where gradients are off."""
    engine, _, launch = _engine(tight)
    results = [launch(step) for step in range(3)]
    with torch.no_grad():
        return [*map(_numbers, reversed(results)), _state(engine)]


def test_reading_a_step_settles_those_before(pool) -> None:
    assert pool.run(2, _read_backwards, {0, 1}) == pool.run(2, _read_backwards, None)


def _evaluate(tight: set[int] | None) -> list:
    engine, _, launch = _engine(tight)
    results = [launch(step) for step in range(2)]
    with patch.object(engine.capacity, "rows", lambda even, most: most):
        loss = engine.evaluate(_batches(engine, 2))
    return [loss, *map(_numbers, results)]


def test_evaluation_is_of_the_weights_after_all_steps(pool) -> None:
    assert pool.run(2, _evaluate, {1}) == pool.run(2, _evaluate, None)


class _CountReads(TorchDispatchMode):
    """How often the host asks a tensor for values."""

    def __enter__(self):
        self.reads, tolist = 0, torch.Tensor.tolist  # which is not dispatched on the CPU

        def counted(tensor: torch.Tensor) -> list:
            self.reads += 1
            return tolist(tensor)

        torch.Tensor.tolist = counted
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _reads(tight: set[int] | None) -> int:
    engine, passes, launch = _engine(tight)
    launch(0).wait()
    with _CountReads() as count:
        launch(1)
    assert passes == [0, 1]
    return count.reads


def test_a_step_does_not_ask_whether_rows_fitted(pool) -> None:
    bounded, unbounded = (pool.run(2, _reads, tight) for tight in ({1}, None))
    assert bounded == unbounded and all(unbounded)


def _memory(ahead: int) -> tuple[int, int]:
    """How many steps' micro-batches are kept at most, and after the last result has been read."""
    engine, _, launch = _engine({1})
    kept: list[weakref.ref] = []
    step = engine.step

    def remember(batches, lr):
        kept.append(weakref.ref(batches[0].tokens_BS))
        return step(batches, lr)

    engine.step = remember

    def alive() -> int:
        return sum(batch() is not None for batch in kept)

    results, most = [], 0
    for number in range(MOST + 3):
        results.append(launch(number))
        most = max(most, alive())
        if len(results) > ahead:
            results.pop(0).wait()
    for result in results:
        result.wait()
    return most, alive()


@pytest.mark.parametrize(("ahead", "most"), [(1, 2), (99, MOST)])
def test_no_more_micro_batches_are_kept_than_needed(pool, ahead, most) -> None:
    assert pool.run(2, _memory, ahead) == [(most, 0)] * 2


def _spoil(engine: Engine, times: list[int], passes: list[int]) -> None:
    """The gradients of those passes, by their place among all, are not finite."""
    parameter = engine.optimizer.parameters["layers.1.moe.experts.w2"]

    def spoil(parameter: torch.Tensor) -> None:
        if len(passes) - 1 in times:
            local(parameter.grad).fill_(torch.nan)

    parameter.register_post_accumulate_grad_hook(spoil)


def _spoilt_then_finite() -> list:
    engine, passes, launch = _engine({0})
    _spoil(engine, [0], passes)
    return [_numbers(launch(0)), _state(engine)]


def test_the_repeat_decides_whether_a_gradient_is_finite(pool) -> None:
    assert pool.run(2, _spoilt_then_finite) == pool.run(2, _one_step)


def _one_step() -> list:
    engine, _, launch = _engine(None)
    return [_numbers(launch(0)), _state(engine)]


def _refused(tight: set[int], spoilt: list[int]) -> tuple[bool, list[int], list]:
    """Two steps, the first of which fails, then one that does not."""
    engine, passes, launch = _engine(tight)
    _spoil(engine, spoilt, passes)
    before = _state(engine)
    failed, since = launch(0), launch(1)
    for result in (failed, since, failed):
        with pytest.raises(NonFiniteGradient, match="layers.1.moe.experts.w2 on rank 0"):
            result.wait()
    unchanged = _state(engine) == before
    done = passes.copy()
    return unchanged, done, [_numbers(launch(0)), _state(engine)]


@pytest.mark.parametrize(
    ("tight", "spoilt", "passes"), [({0}, [2], [0, 1, 0, 1]), ({1}, [0], [0, 1]), ({0, 1}, [0, 2], [0, 1, 0, 1])], ids=str
)
def test_a_failed_step_takes_those_since_with_it(pool, tight, spoilt, passes) -> None:
    expected = pool.run(2, _one_step)
    for (unchanged, done, after), wanted in zip(pool.run(2, _refused, tight, spoilt), expected, strict=True):
        assert unchanged and done == passes
        assert after == wanted
