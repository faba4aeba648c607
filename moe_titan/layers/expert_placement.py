"""Which rank holds which expert, changed now and then so that every rank gets about as many rows.

Under natural routing some experts are chosen several times as often as others, and the ranks that hold more of those make all
others wait. An expert is the same on every rank, so moving it, with its optimizer state, changes nothing but who computes
(FasterMoE, PPoPP 2022, and SmartMoE, USENIX ATC 2023, move or copy experts for the same reason).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_titan.layers.moe import MoE
from moe_titan.optimizer import ShardedAdamW
from parallelisms.folded_mesh import FoldedMesh
from parallelisms.routing import Placement, without_waiting

_EVEN = 1.02
"""Rows of the fullest rank over the mean, at which a layer is left as it is."""


class ExpertPlacement:
    """Owns where the experts of every layer are: in which slot, of which rank ``s // (E / ep)`` has slot s.

    Router, expert bias, counts and checkpoints know experts by their number and nothing of this; dispatch does.

    Args:
        layers: by name, the MoE layers and the names of their experts' parameters.
        optimizer: holds all that has to move with an expert.
        mesh: of its layout ``ep``, among whose ranks loads become even.
        by_expert: FSDP2 shards a rank's experts one by one, not each within itself.
    """

    def __init__(self, layers: dict[str, tuple[MoE, list[str]]], optimizer: ShardedAdamW, mesh: FoldedMesh, by_expert: bool):
        self._layers, self._optimizer, self._ep = layers, optimizer, mesh.layout.ep
        self._group = None
        if self._ep > 1:
            self._group = mesh.expert_shard_group if by_expert else mesh.group("ep")
            self._shards = mesh.layout.edp_shard if by_expert else 1
        self.expert_of_slot = {name: list(range(moe.experts.num_experts)) for name, (moe, _) in layers.items()}
        self._now = dict(self.expert_of_slot)

    def rebalance(self, loads: dict[str, Tensor]) -> None:
        """Swaps experts between ranks. All ranks call it with the same loads.

        Args:
            loads: tokens per expert [E] by layer, on the CPU.
        """
        if self._group is None:
            return
        for name, load in loads.items():
            self.expert_of_slot[name] = even_slots(self.expert_of_slot[name], load.tolist(), self._ep)
        self._arrange(self.expert_of_slot)

    @contextmanager
    def by_number(self) -> Iterator[None]:
        """Within it every expert is in the slot of its own number, as whoever saves or loads takes it to be.

        Then they go to where ``expert_of_slot`` has them, which may have been loaded meanwhile. All ranks enter it together.
        """
        self._arrange({name: sorted(slots) for name, slots in self.expert_of_slot.items()})
        yield
        self._arrange(self.expert_of_slot)

    def _arrange(self, expert_of_slot: dict[str, list[int]]) -> None:
        if self._group is None:
            return
        for name, wanted in expert_of_slot.items():
            if wanted != self._now[name]:
                self._move(name, wanted)
                self._now[name] = wanted

    @torch.no_grad()
    def _move(self, name: str, wanted: list[int]) -> None:
        moe, parameters = self._layers[name]
        self._optimizer.before_change()
        held = [tensor for parameter in parameters for tensor in self._optimizer.tensors(parameter)]
        _exchange(held, self._now[name], wanted, _homes(len(wanted), self._ep, self._shards), self._group)
        is_sorted = wanted == sorted(wanted)
        moe.placement = None if is_sorted else Placement.of(wanted, held[0].device)


def even_slots(expert_of_slot: list[int], loads: list[int], ranks: int) -> list[int]:
    """A placement in which ranks have more even loads, by as few swaps as a greedy choice needs: of the fullest and the emptiest
    rank, the two experts whose loads differ by what comes closest to half of the ranks' difference."""
    slots_RS = np.array(expert_of_slot).reshape(ranks, -1)
    load_of_expert = np.array(loads)
    limit = _EVEN * sum(loads) / ranks
    for _ in expert_of_slot:
        loads_RS = load_of_expert[slots_RS]
        totals_R = loads_RS.sum(1)
        full, empty = totals_R.argmax(), totals_R.argmin()
        gap = totals_R[full] - totals_R[empty]
        left_SS = abs(gap - 2 * (loads_RS[full][:, None] - loads_RS[empty]))
        a, b = np.unravel_index(left_SS.argmin(), left_SS.shape)
        if totals_R[full] <= limit or left_SS[a, b] >= gap:
            break
        slots_RS[full, a], slots_RS[empty, b] = slots_RS[empty, b], slots_RS[full, a]
    return slots_RS.flatten().tolist()


def _homes(num_experts: int, ep: int, shards: int) -> list[tuple[int, int]]:
    """Of each slot the rank that holds it, ep varying fastest, and which of that rank's it is; FSDP2 cuts like torch.chunk."""
    e = num_experts // ep
    chunk = -(-e // shards)
    return [(slot // chunk * ep + rank, slot % chunk) for rank in range(ep) for slot in range(e)]


def _exchange(held: list[Tensor], old: list[int], new: list[int], homes: list[tuple[int, int]], group: ProcessGroup) -> None:
    """Brings the experts of this rank's slots, in place.

    Args:
        held: of each tensor this rank's part, by slot along the first dimension.
        old, new: which expert is in each slot.
        homes: of each slot, see :func:`_homes`.
    """
    me, ranks = group.rank(), range(group.size())
    slot_of_expert = {expert: slot for slot, expert in enumerate(old)}
    moves = [(homes[slot_of_expert[expert]], homes[slot]) for slot, expert in enumerate(new) if old[slot] != expert]
    leaving = [[index for (rank, index), (to, _) in moves if (rank, to) == (me, other)] for other in ranks]
    coming = [[index for (rank, _), (to, index) in moves if (rank, to) == (other, me)] for other in ranks]
    out, into = (
        without_waiting(torch.tensor([index for of_rank in indices for index in of_rank], dtype=torch.int64), held[0].device)
        for indices in (leaving, coming)
    )
    sent = torch.cat([part[out].flatten(1).view(torch.uint8) for part in held], dim=1)
    received = sent.new_empty(len(into), sent.shape[1])
    dist.all_to_all_single(received, sent, [len(s) for s in coming], [len(s) for s in leaving], group=group)
    start = 0
    for part in held:
        width = part[0].nbytes
        part[into] = received[:, start : start + width].contiguous().view(part.dtype).view(len(into), *part.shape[1:])
        start += width
