"""What passes between router, dispatcher and experts, and the tape that keeps what a forward pass chose."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

# Named tuples, since FSDP2's hooks look for tensors in what a module takes and returns as in any tree of containers.


class PairOrder(NamedTuple):
    """(token, choice) pairs by expert, from :func:`kernels.sort.sort_pairs`; pair p is choice p % K of token p // K."""

    pair_P: Tensor
    row_P: Tensor
    counts_E: Tensor
    offsets_E: Tensor


class Routing(NamedTuple):
    """What the router decided for this rank's tokens.

    ``topk_experts_TK`` int64 in [0, E], where E itself means "not routed" (padding); ``topk_weights_TK`` fp32, zero there;
    ``order`` the routed pairs by expert, with the counts; ``balance_loss`` fp32 scalar, this rank's share, already attached to
    the weights' gradient, or None when every balance loss is off.
    """

    topk_experts_TK: Tensor
    topk_weights_TK: Tensor
    order: PairOrder
    balance_loss: Tensor | None = None

    @property
    def tokens_per_expert_E(self) -> Tensor:
        """int64 counts of this rank's routed pairs."""
        return self.order.counts_E


def without_waiting(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device, for which the host does not wait."""
    return x.to(device) if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


class Placement(NamedTuple):
    """Where experts are, int64: ``slot_E1`` [E + 1] the slot of each expert, and E, "not routed", for itself; ``expert_E`` the
    expert in each slot."""

    slot_E1: Tensor
    expert_E: Tensor

    @classmethod
    def of(cls, expert_of_slot: list[int], device: torch.device) -> "Placement":
        expert_E = torch.tensor(expert_of_slot, dtype=torch.int64)
        slot_E1 = torch.cat((expert_E.argsort(), torch.tensor([len(expert_of_slot)])))
        return cls(without_waiting(slot_E1, device), without_waiting(expert_E, device))

    def of_slots(self, routing: Routing) -> Routing:
        """The routing by slots, as dispatchers between ranks take it. Of ``order`` they read the counts; the rest stays."""
        order = routing.order._replace(counts_E=routing.tokens_per_expert_E[self.expert_E])
        return routing._replace(topk_experts_TK=self.slot_E1[routing.topk_experts_TK], order=order)


class RoutedTokens(NamedTuple):
    """Rows grouped by local expert: all that experts and combine see of the tokens.

    The rows are named, not copied: row r is token ``pair_R[r] // K`` of ``tokens_ND`` with weight ``weights_P[pair_R[r]]``, P =
    N K. R is a capacity; rows from ``offsets_e[-1]`` on are no token's (-1) and count as zeros. ``row_NK``: where each pair's
    row stands, -1 for nowhere. ``offsets_e`` int32 on the device: where each local expert's rows end. ``packed_NW``: tokens that
    arrived packed, see :mod:`kernels.packed_tokens`; ``tokens_ND`` then has no values, and takes the gradient.
    """

    tokens_ND: Tensor
    weights_P: Tensor
    pair_R: Tensor
    row_NK: Tensor
    offsets_e: Tensor
    packed_NW: Tensor | None = None


@dataclass
class RoutingTape:
    """The routing of one forward pass, layer by layer, kept by the caller of forward, never by the layers.

    A forward pass under :meth:`recording` leaves its choices here; a recomputation under :meth:`replaying` takes the chosen
    experts from here, so that activation checkpointing can never route a token elsewhere, and adds nothing. A forward pass
    under neither (evaluation) leaves no trace.

    Args:
        valid_T: bool, which of this rank's tokens carry data; None when all do.
        loss_denominator: trained tokens of the global batch, by which every loss of the step is divided.
    """

    valid_T: Tensor | None = None
    loss_denominator: Tensor | float = 1.0
    layers: dict[str, Routing] = field(default_factory=dict)
    replay: bool = False

    def record(self, layer: str, routing: Routing) -> None:
        if not self.replay:
            loss = routing.balance_loss
            self.layers[layer] = Routing(
                routing.topk_experts_TK,
                routing.topk_weights_TK.detach(),
                routing.order,
                None if loss is None else loss.detach(),
            )

    def chosen_experts(self, layer: str) -> Tensor | None:
        return self.layers[layer].topk_experts_TK if self.replay else None

    def recording(self) -> AbstractContextManager[None]:
        return _activated(self)

    def narrowed(self, valid_T: Tensor) -> AbstractContextManager[None]:
        """The same pass for layers to which other tokens than ``self.valid_T`` are valid."""
        return _activated(replace(self, valid_T=valid_T))

    def replaying(self) -> AbstractContextManager[None]:
        return _activated(replace(self, replay=True))

    def balance_loss(self) -> Tensor | None:
        losses = [routing.balance_loss for routing in self.layers.values() if routing.balance_loss is not None]
        return torch.stack(losses).sum() if losses else None


# Per thread: autograd may recompute in threads of its own.
_active = threading.local()


def active_tape() -> RoutingTape | None:
    """The tape of the forward pass or recomputation now running in this thread."""
    return getattr(_active, "tape", None)


def replay_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint``: forward as it is, recomputation with the routing that forward chose."""
    tape = active_tape()
    return nullcontext(), tape.replaying() if tape is not None else nullcontext()


@contextmanager
def _activated(tape: RoutingTape) -> Iterator[None]:
    previous = active_tape()
    _active.tape = tape
    try:
        yield
    finally:
        _active.tape = previous
