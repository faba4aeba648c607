"""The numbers of an optimizer step, which the host asks for when it needs them."""

from math import isfinite

import torch
from torch import Tensor

from moe_titan.optimizer import NonFiniteGradient, ShardedAdamW, Update


class StepResult:
    """One step's results, the same on every rank. Whoever reads one waits until the device has come to it.

    Args:
        optimizer, update: whose update the step was, and what it found.
        loss: scalar, per trained token of the global batch.
        tokens: scalar, trained in the global batch.
        expert_load: int64 [E] tokens per expert, by layer.
        balance_loss: scalar, None without one.
    """

    def __init__(
        self,
        optimizer: ShardedAdamW,
        update: Update,
        loss: Tensor,
        tokens: Tensor,
        expert_load: dict[str, Tensor],
        balance_loss: Tensor | None,
    ):
        self._optimizer, self._update, self._layers = optimizer, update, list(expert_load)
        numbers = [loss, update.norm, tokens, *([] if balance_loss is None else [balance_loss])]
        copies = [torch.stack([number.detach().double() for number in numbers])]
        copies += [torch.stack(list(expert_load.values()))] if expert_load else []
        self._copies = [each.to("cpu", non_blocking=True) for each in copies]
        self._done = torch.cuda.Event() if loss.is_cuda else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> "StepResult":
        """Returns itself once everything is there.

        Raises:
            NonFiniteGradient: the loss or a gradient was not finite: neither this step nor one since has changed a parameter.
                All ranks must wait for the same step.
        """
        if self._done is not None:
            self._done.synchronize()
        loss, norm, *_ = self._copies[0].tolist()
        if not isfinite(norm):
            try:
                self._optimizer.refuse(self._update)
            except NonFiniteGradient as error:
                raise NonFiniteGradient(f"{error}; the loss is {loss}") from None
        return self

    @property
    def loss(self) -> float:
        return self._number(0)

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return self._number(1)

    @property
    def tokens(self) -> int:
        return int(self._number(2))

    @property
    def balance_loss(self) -> float | None:
        return self._number(3) if len(self._copies[0]) > 3 else None

    @property
    def expert_load(self) -> dict[str, Tensor]:
        """Tokens per expert by layer, int64 [E] on the CPU."""
        self.wait()
        return dict(zip(self._layers, self._copies[1], strict=True)) if self._layers else {}

    def _number(self, index: int) -> float:
        self.wait()
        return self._copies[0][index].item()
