"""What a data rank reads for its optimizer steps. Without torch, which is slow to import: the process that reads ahead
needs none of it."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_titan.data.packing import PackedStream
from moe_titan.data.source import Source
from moe_titan.data.tokenizer import Tokenizer


class Step(NamedTuple):
    """M micro-batches of B samples, int64, and where the rank's own streams stand after them: (epoch, document, token)."""

    tokens_MBS: np.ndarray
    labels_MBS: np.ndarray
    position_O3: np.ndarray


@dataclass(frozen=True)
class Reader:
    """Of the `num_streams` streams of the global batch, those in `own_MB` give a step's samples, in this order."""

    source: Source
    tokenizer: Tokenizer
    seq_len: int
    seed: int
    num_streams: int
    own_MB: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Of a `Step` as one record."""
        shapes = (*self.own_MB.shape, self.seq_len), (*self.own_MB.shape, self.seq_len), (self.own_MB.size, 3)
        return np.dtype([(name, np.int64, shape) for name, shape in zip(Step._fields, shapes, strict=True)])

    def steps(self, position_G3: np.ndarray) -> Generator[Step, None, None]:
        """The steps from a position on, without end.

        Raises:
            ValueError: at once or on reading, the position does not fit the corpus; on reading, a record without text.
        """
        own = {int(g): tuple(position_G3[g].tolist()) for g in self.own_MB.flat}
        dealt = self.source.deal({g: position[:2] for g, position in own.items()}, self.num_streams, self.seed)
        streams = [PackedStream(dealt[g], self.tokenizer, self.seq_len, position) for g, position in own.items()]

        def read() -> Generator[Step, None, None]:
            while True:
                samples = np.stack([stream.next_sample() for stream in streams]).reshape(*self.own_MB.shape, -1)
                tokens_MBS, labels_MBS = np.ascontiguousarray(samples[..., :-1]), np.ascontiguousarray(samples[..., 1:])
                yield Step(tokens_MBS, labels_MBS, np.array([stream.position for stream in streams], np.int64))

        return read()
