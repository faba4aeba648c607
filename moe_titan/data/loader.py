"""The micro-batches of each optimizer step for one data rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_titan.data.read_ahead import ReadAhead
from moe_titan.data.reader import Reader
from moe_titan.data.source import RandomAccessSource, Source
from moe_titan.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_titan.config import Config

logger = logging.getLogger(__name__)

IGNORED = -100  # label of a position that is not trained on


class MicroBatch(NamedTuple):
    tokens_BS: Tensor  # int64
    labels_BS: Tensor  # int64; IGNORED where nothing is trained
    valid_BS: Tensor | None = None  # bool, False on padding; None: there is none


class DataLoader:
    """Packed samples of a corpus, looped over without end, an optimizer step's share at a time.

    The global batch of G samples is fed by G streams of documents, one sample each per step. Micro-batch m of data
    rank d holds the samples (m * dp_degree + d) * local_batch_size + b, and a rank reads only its own streams: the
    global batch of a step depends on the corpus, `seq_len`, `global_batch_size` and `seed`, and on nothing else.

    Args:
        prefetch: optimizer steps that a child process reads ahead, for which `source` and `tokenizer` must be picklable; 0 reads
            in the calling process.
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
        if isinstance(source, RandomAccessSource) and len(source) < global_batch_size and dp_rank == 0:
            logger.warning(
                f"The corpus has {len(source)} documents for training.global_batch_size = {global_batch_size}: samples of a "
                "batch will repeat each other. Use more documents or a smaller global batch."
            )
        own_MB = np.arange(global_batch_size).reshape(-1, dp_degree, local_batch_size)[:, dp_rank]
        self._reader = Reader(source, tokenizer, seq_len, seed, global_batch_size, own_MB)
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        streams = np.arange(global_batch_size)
        self._open(np.stack([0 * streams, streams, 0 * streams], axis=1))

    def _open(self, position_G3: np.ndarray) -> None:
        steps = self._reader.steps(position_G3)  # in any case, to refuse here what does not fit
        self._steps = ReadAhead(self._reader, position_G3, self._prefetch) if self._prefetch else steps
        self._position_O3 = position_G3[self._reader.own_MB.ravel()]

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, on the CPU.

        Raises:
            RuntimeError: the process that reads ahead has died.
        """
        *arrays, self._position_O3 = next(self._steps)
        tokens_MBS, labels_MBS = map(torch.from_numpy, arrays)
        if self._pin_memory:
            tokens_MBS, labels_MBS = tokens_MBS.pin_memory(), labels_MBS.pin_memory()
        return [MicroBatch(*batch) for batch in zip(tokens_MBS, labels_MBS, strict=True)]

    def close(self) -> None:
        """Ends reading ahead, without waiting for it."""
        self._steps.close()

    def state_dict(self) -> dict[str, Tensor]:
        """`position`, [global_batch_size, 3] int64: where the next step starts reading, as rows (epoch, document of the
        epoch, token). Rows of other data ranks' streams are zero: the sum over the data ranks is the whole."""
        position_G3 = torch.zeros(self._reader.num_streams, 3, dtype=torch.int64)
        position_G3[self._reader.own_MB.ravel()] = torch.from_numpy(self._position_O3)
        return {"position": position_G3}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the sum of all data ranks' `state_dict`, whatever their number was.

        Raises:
            ValueError: the global batch size is another one, or the position does not fit the corpus.
        """
        position_G3 = state["position"].numpy(force=True)
        if position_G3.shape != (self._reader.num_streams, 3):
            raise ValueError(
                f"training.global_batch_size = {self._reader.num_streams}: the checkpoint's data position is of a run with "
                f"{len(position_G3)} and continues with no other. Set training.global_batch_size = {len(position_G3)}."
            )
        former = self._steps
        self._open(position_G3)
        former.close()


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
