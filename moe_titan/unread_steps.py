"""Steps that nobody has waited for yet: what becomes of them is decided here, in their order."""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from moe_titan.optimizer import NonFiniteGradient, ShardedAdamW
from moe_titan.step_result import Numbers, StepResult
from parallelisms.dispatch.capacity import RowCapacity

MOST = 4
"""Steps with bounded rows that are kept; beyond that the oldest is waited for."""


class _Unread(NamedTuple):
    result: StepResult
    run: Callable[[], Numbers]


class UnreadSteps:
    """Repeats steps whose rows did not fit, and refuses those whose gradient is not finite.

    Either halts the optimizer on the device, so that the steps launched since have changed nothing. Where rows are bounded, a
    step is kept with its micro-batches until it has been waited for; one whose rows did not fit is run again then with room for
    all, and after it, in their order, those launched since.
    """

    def __init__(self, optimizer: ShardedAdamW, capacity: RowCapacity):
        self._optimizer, self._capacity = optimizer, capacity
        self._kept: list[_Unread] = []

    def launch(self, run: Callable[[], Numbers]) -> StepResult:
        """``run`` gives the device one step, and may be called again until the result has been waited for."""
        result = StepResult(run(), self._settle)
        if self._capacity.bounded:
            self._kept.append(_Unread(result, run))
            if len(self._kept) > MOST:
                self._kept[0].result.wait()
        return result

    def wait(self) -> None:
        """For every step that is kept."""
        if self._kept:
            self._kept[-1].result.wait()

    def _settle(self, result: StepResult) -> None:
        if not self._capacity.bounded:
            self._conclude(result)
        while not result.settled:
            oldest = self._kept[0].result
            if oldest.numbers.scalars()["exceeded"]:
                self._run_again()
            del self._kept[0]
            self._conclude(oldest)

    def _run_again(self) -> None:
        oldest, *since = self._kept
        self._optimizer.take_back(oldest.result.numbers.update)
        with self._capacity.lifted():
            oldest.result.numbers = oldest.run()
        for step in since:
            step.result.numbers = step.run()

    def _conclude(self, result: StepResult) -> None:
        result.settled = True
        scalars = result.numbers.scalars()
        if isfinite(scalars["norm"]):
            return
        try:
            self._optimizer.refuse(result.numbers.update)
        except NonFiniteGradient as error:
            failure = NonFiniteGradient(f"{error}; the loss is {scalars['loss']}")
        for failed in (result, *(step.result for step in self._kept)):
            failed.settled, failed.failure = True, failure
        self._kept.clear()
