"""Memory that several ranks share and reach by plain loads and stores, and the rules by which they take turns in it.

A *transfer* is an op that every rank of the group calls, all in the same order: each writes into the others' memory and reads
what they wrote into its own. Half of a rank's programs send and half receive, so that the links and the local memory are busy at
the same time: sender p of a rank writes for receiver p of the others, in a few steps with a signal after each.

Signals are counters that only grow, and every program counts its transfers on the device, so that a CUDA graph that is replayed
counts on. There are two kinds:

- ``SENT`` is ``n * STEPS + i + 1`` once the sender has written step i of transfer n; its receivers wait for that;
- ``READ`` is ``n + 1`` once the receiver has read all of transfer n; senders wait for that before they write transfer n + 1.

As sender and receiver p have the same tokens in every transfer, nothing is overwritten that is still to be read. Programs start
in the order of their numbers, a sender just before its receiver. A sender waits only for the transfer before, and receiver p only
for senders p, so the lowest pair that is unfinished anywhere can always go on: a transfer never needs all of its programs on the
device at once.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

SENT, READ = 0, 1
STEPS = 16
"""The most steps of a transfer."""

Allocate = Callable[[int, torch.device], list[Tensor]]
"""``allocate(nbytes, device)``: collective; one zeroed uint8 tensor for each rank, all of which this process can reach."""


class PeerError(RuntimeError):
    """A rank of the group did not take part in a transfer in time."""


class TransferShape(NamedTuple):
    """Token width D, choices K, type of the tokens; routing weights and their gradients travel in at least fp32."""

    D: int
    K: int
    dtype: torch.dtype

    @property
    def weights_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class Memory(NamedTuple):
    """What others write to one rank, T the most tokens of a rank, W ranks, P senders of each.

    By the rank that writes: ``signals`` [W, 2, P] int64, by kind; ``tokens`` [W, T, D], tokens or sums of rows; ``experts``
    [W, T, K] int32; ``weights`` [W, T, K], weights or their gradients.
    """

    signals: Tensor
    tokens: Tensor
    experts: Tensor
    weights: Tensor


class _Field(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    def of(self, memory: Tensor, start: int) -> Tensor:
        return memory[start : start + self.nbytes].view(self.dtype).view(self.size)


class Peers:
    """The memory of every rank for one shape of tokens.

    ``table`` [fields, W] int64: addresses of each field on each rank; ``state`` [2 P + 1] int64: transfers that each of the P
    senders and P receivers has finished, then a place for the device to note a failure; ``failure`` [1] int64 in the host's
    memory: 1 + the rank that a transfer missed.
    """

    def __init__(self, memories: list[Memory], device: torch.device):
        self.memories = memories
        pairs = memories[0].signals.shape[-1]
        addresses = [[getattr(memory, name).data_ptr() for memory in memories] for name in Memory._fields]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(2 * pairs + 1, dtype=torch.int64, device=device)
        self.failure = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


@dataclass
class Exchange:
    """A group of ranks that transfer tokens: its sizes, and its memory, which is allocated at the first transfer of a shape.

    Args:
        rank, world: place in the group and its size.
        max_tokens: the most tokens that a rank may bring.
        programs: programs of a transfer, at least 2, i.e. at most so many multiprocessors; the same on every rank.
        names: how to call the ranks in an error.
        timeout: seconds after which a rank that did not signal is given up; see :func:`set_timeout`.
    """

    rank: int
    world: int
    max_tokens: int
    programs: int
    allocate: Allocate
    names: list[str]
    timeout: float = 300.0
    _peers: dict[TransferShape, Peers] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Places for received tokens: token t of rank s has place ``s * max_tokens + t``."""
        return self.world * self.max_tokens

    @property
    def pairs(self) -> int:
        """Senders, and as many receivers."""
        return self.programs // 2

    def peers(self, shape: TransferShape, device: torch.device) -> Peers:
        """Collective at the first call for a shape. Raises PeerError once a transfer has missed a rank."""
        if shape not in self._peers:
            self._peers[shape] = self._build(shape, device)
            if device.type == "cuda":
                threading.Thread(target=self._watch, args=(self._peers[shape],), daemon=True).start()
        peers = self._peers[shape]
        self.check(peers)
        return peers

    def check(self, peers: Peers) -> None:
        if missing := int(peers.failure):
            raise PeerError(self._message(missing - 1))

    def _build(self, shape: TransferShape, device: torch.device) -> Peers:
        W, T = self.world, self.max_tokens
        fields = {
            "signals": _Field((W, 2, self.pairs), torch.int64),
            "tokens": _Field((W, T, shape.D), shape.dtype),
            "experts": _Field((W, T, shape.K), torch.int32),
            "weights": _Field((W, T, shape.K), shape.weights_dtype),
        }
        *starts, end = accumulate((-(-part.nbytes // 128) * 128 for part in fields.values()), initial=0)
        places = dict(zip(fields, starts, strict=True))
        memories = [
            Memory(**{name: part.of(memory, places[name]) for name, part in fields.items()})
            for memory in self.allocate(end, device)
        ]
        return Peers(memories, device)

    def _message(self, rank: int) -> str:
        return (
            f"{self.names[rank]} did not take part in an expert dispatch within {self.timeout:g} s: it has died or hangs, "
            "or it runs other layers than this rank; look into its log first"
        )

    def _watch(self, peers: Peers) -> None:
        """Ends a process whose host waits for the device for good, e.g. in a collective with the rank that is missing."""
        while True:
            time.sleep(1)
            if int(peers.failure):
                time.sleep(5)  # for a host that can still raise the error itself
                if missing := int(peers.failure):
                    print(f"PeerError: {self._message(missing - 1)}", file=sys.stderr, flush=True)
                    os._exit(1)


_exchanges: dict[str, Exchange] = {}


def register(name: str, exchange: Exchange) -> None:
    """Ops find an exchange by name: its buffers and counters are no more an argument of theirs than a communicator's are."""
    _exchanges[name] = exchange


def exchange(name: str) -> Exchange:
    return _exchanges[name]


def set_timeout(seconds: float) -> None:
    """Bound of all exchanges for how far a rank may be behind. CUDA graphs keep the bound that they were captured with."""
    for each in _exchanges.values():
        each.timeout = seconds
