"""The micro-batches of each optimizer step for one data rank."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_titan.data.packing import PackedStream
from moe_titan.data.source import Source
from moe_titan.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_titan.config import Config


IGNORED = -100  # label of a position that is not trained on


class MicroBatch(NamedTuple):
    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64; IGNORED where nothing is trained
    valid_BS: Tensor | None = None  # bool, False on padding; None: there is none


class _Step(NamedTuple):
    batches: list[MicroBatch]
    position_G3: Tensor  # after this step


class DataLoader:
    """Packed samples of a corpus, looped over without end, an optimizer step's share at a time.

    The global batch of G samples is fed by G streams of documents, one sample each per step. Micro-batch m of data
    rank d holds the samples (m * dp_degree + d) * local_batch_size + b, and a rank reads only its own streams: the
    global batch of a step depends on the corpus, `seq_len`, `global_batch_size` and `seed`, and on nothing else.

    Args:
        prefetch: optimizer steps that a background thread reads ahead; 0 reads in the calling thread.
        pin_memory: return page-locked tensors.

    Raises:
        ValueError: `global_batch_size` is not a multiple of `local_batch_size * dp_degree`. While reading: a record
            without text, or a position that does not fit the corpus.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        local_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        prefetch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if global_batch_size % (local_batch_size * dp_degree):
            raise ValueError(
                f"training.global_batch_size = {global_batch_size} must be a multiple of training.local_batch_size "
                f"times the number of data ranks, {local_batch_size} x {dp_degree}."
            )
        self._source, self._tokenizer, self._seq_len, self._seed = source, tokenizer, seq_len, seed
        self._num_streams = global_batch_size
        # [micro-batches, local batch] of stream numbers
        self._own_MB = np.arange(global_batch_size).reshape(-1, dp_degree, local_batch_size)[:, dp_rank]
        self._pin_memory = pin_memory
        self._prefetch = prefetch
        self._thread = ThreadPoolExecutor(1, "data") if prefetch else None
        self._ahead: deque[Future[_Step]] = deque()
        streams = torch.arange(global_batch_size)
        self._open(torch.stack([0 * streams, streams, 0 * streams], dim=1))

    def _open(self, position_G3: Tensor) -> None:
        own = {int(g): tuple(position_G3[g].tolist()) for g in self._own_MB.flat}
        dealt = self._source.deal({g: position[:2] for g, position in own.items()}, self._num_streams, self._seed)
        self._streams = {g: PackedStream(dealt[g], self._tokenizer, self._seq_len, position) for g, position in own.items()}
        self._position_G3 = self._current_position()

    def _current_position(self) -> Tensor:
        position_G3 = torch.zeros(self._num_streams, 3, dtype=torch.int64)
        position_G3[list(self._streams)] = torch.tensor([stream.position for stream in self._streams.values()])
        return position_G3

    def _read_step(self) -> _Step:
        batches = []
        for own_B in self._own_MB:
            samples = torch.from_numpy(np.stack([self._streams[int(g)].next_sample() for g in own_B]))
            batches.append(MicroBatch(samples[:, :-1].contiguous(), samples[:, 1:].contiguous()))
        return _Step(batches, self._current_position())

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, on the CPU."""
        if self._thread is None:
            step = self._read_step()
        else:
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._thread.submit(self._read_step))
            step = self._ahead.popleft().result()
        self._position_G3 = step.position_G3
        if not self._pin_memory:
            return step.batches
        return [MicroBatch(tokens.pin_memory(), labels.pin_memory()) for tokens, labels, _ in step.batches]

    def state_dict(self) -> dict[str, Tensor]:
        """`position`, [global_batch_size, 3] int64: where the next step starts reading, as rows (epoch, document of the
        epoch, token). Rows of other data ranks' streams are zero: the sum over the data ranks is the whole."""
        return {"position": self._position_G3.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the sum of all data ranks' `state_dict`, whatever their number was.

        Raises:
            ValueError: the global batch size is another one, or the position does not fit the corpus.
        """
        position_G3 = state["position"].cpu()
        if position_G3.shape != (self._num_streams, 3):
            raise ValueError(
                f"training.global_batch_size = {self._num_streams}: the checkpoint's data position is of a run with "
                f"{len(position_G3)} and continues with no other. Set training.global_batch_size = {len(position_G3)}."
            )
        wait(self._ahead)  # the thread must be out of the streams
        self._ahead.clear()
        self._open(position_G3)


def build_dataloader(config: Config, source: Source, tokenizer: Tokenizer, dp_rank: int, dp_degree: int) -> DataLoader:
    """The loader that `config.training` describes, for data rank `dp_rank` of `dp_degree`.

    Raises:
        ValueError: see `DataLoader`.
    """
    training, workers = config.training, config.training.dataloader
    return DataLoader(
        source,
        tokenizer,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=training.global_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        seed=config.debug.seed,
        prefetch=(workers.prefetch_factor or 2) if workers.num_workers else 0,
        pin_memory=workers.pin_memory and torch.cuda.is_available(),
    )
