"""The numbers of an optimizer step, which the host asks for when it needs them."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_titan.moment import Moment
from moe_titan.optimizer import NonFiniteGradient, Update


class Numbers:
    """What one pass over a step's micro-batches found, on its way to the host. Reading it waits for the device.

    Args:
        loss: scalar, per trained token of the global batch.
        tokens: scalar, trained in the global batch.
        expert_load: int64 [E] tokens per expert, by layer.
        balance_loss: scalar, None without one.
        exceeded: bool scalar, whether rows were left out; None where there is room for all.
        mtp_loss: scalar, as the loss, of the tokens predicted beyond the next, mean over depths; None without any.
    """

    def __init__(
        self,
        update: Update,
        loss: Tensor,
        tokens: Tensor,
        expert_load: dict[str, Tensor],
        balance_loss: Tensor | None,
        exceeded: Tensor | None,
        mtp_loss: Tensor | None = None,
    ):
        self.update = update
        named = {"loss": loss, "norm": update.norm, "tokens": tokens, "balance_loss": balance_loss, "mtp_loss": mtp_loss}
        named["exceeded"] = exceeded
        scalars = {name: scalar.detach().double() for name, scalar in named.items() if scalar is not None}
        self._names, self._layers = list(scalars), list(expert_load)
        copies = [torch.stack(list(scalars.values()))]
        copies += [torch.stack(list(expert_load.values()))] if expert_load else []
        self._copies = [each.to("cpu", non_blocking=True) for each in copies]
        self.finished = Moment(loss.device)

    def scalars(self) -> dict[str, float]:
        """Those of ``loss``, ``norm``, ``tokens``, ``balance_loss``, ``exceeded`` and ``mtp_loss`` that there are."""
        self.finished.wait()
        return dict(zip(self._names, self._copies[0].tolist(), strict=True))

    def expert_load(self) -> dict[str, Tensor]:
        """As on the device, on the CPU."""
        self.finished.wait()
        return dict(zip(self._layers, self._copies[1], strict=True)) if self._layers else {}


class StepResult:
    """One step's results, the same on every rank. Whoever reads one waits until the device has come to it.

    Args:
        numbers: of the step's first pass.
        settle: called once somebody waits; decides what the step's ``numbers`` and ``failure`` are.
    """

    def __init__(self, numbers: Numbers, settle: Callable[["StepResult"], None]):
        self.numbers, self.settled = numbers, False
        self.failure: NonFiniteGradient | None = None
        self._settle = settle

    def wait(self) -> "StepResult":
        """Returns itself once everything is there.

        Raises:
            NonFiniteGradient: the loss or a gradient was not finite: neither this step nor one since has changed a parameter.
                All ranks must wait for the same step.
        """
        if not self.settled:
            self._settle(self)
        if self.failure is not None:
            raise self.failure
        return self

    @property
    def loss(self) -> float:
        return self._scalars()["loss"]

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return self._scalars()["norm"]

    @property
    def tokens(self) -> int:
        return int(self._scalars()["tokens"])

    @property
    def balance_loss(self) -> float | None:
        return self._scalars().get("balance_loss")

    @property
    def mtp_loss(self) -> float | None:
        """Of the tokens predicted beyond the next, mean over depths, unscaled."""
        return self._scalars().get("mtp_loss")

    @property
    def expert_load(self) -> dict[str, Tensor]:
        """Tokens per expert by layer, int64 [E] on the CPU."""
        return self.wait().numbers.expert_load()

    def _scalars(self) -> dict[str, float]:
        return self.wait().numbers.scalars()
