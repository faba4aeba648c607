"""Where documents come from, and how they are dealt to the streams of a global batch.

The documents of all epochs, in order, are numbered 0, 1, 2, ...; stream g of G takes the numbers g, g + G, g + 2G, ...
Which ranks read which streams plays no part in it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


class Document(NamedTuple):
    epoch: int
    number: int  # place in the order of the epoch
    text: str


class Source(ABC):
    @abstractmethod
    def deal(self, starts: Mapping[int, tuple[int, int]], num_streams: int, seed: int) -> dict[int, Iterator[Document]]:
        """The endless documents of each stream in `starts`, from its first one at or after (epoch, index) on.

        Args:
            starts: stream -> (epoch, index); stream g of a new run starts at (0, g).
            num_streams: G.
            seed: of the order of documents; sources that cannot be shuffled pay no heed to it.
        """


class RandomAccessSource(Source):
    """Documents that can be read in any order: shuffled anew in every epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def document(self, index: int) -> str: ...

    def deal(self, starts: Mapping[int, tuple[int, int]], num_streams: int, seed: int) -> dict[int, Iterator[Document]]:
        for stream, (epoch, index) in starts.items():
            if (epoch * len(self) + index) % num_streams != stream:
                raise ValueError(
                    f"The saved data position (epoch {epoch}, document {index}) of stream {stream} does not fit a "
                    f"corpus of {len(self)} documents: training.dataset or training.dataset_path was changed, or its "
                    "files were. Resume with the same data."
                )
        order = lru_cache(maxsize=4)(lambda epoch: _permutation(len(self), seed, epoch))

        def documents(epoch: int, index: int) -> Iterator[Document]:
            while True:
                carry, index = divmod(index, len(self))
                epoch += carry
                yield Document(epoch, index, self.document(int(order(epoch)[index])))
                index += num_streams

        return {stream: documents(*start) for stream, start in starts.items()}


class StreamingSource(Source):
    """Documents that can only be read one after the other, in their own order."""

    @abstractmethod
    def documents(self, start: int) -> Iterator[str]:
        """One pass over the documents from number `start` on."""

    def deal(self, starts: Mapping[int, tuple[int, int]], num_streams: int, seed: int) -> dict[int, Iterator[Document]]:
        # One pass serves all streams of the rank; documents wait in a queue for a stream that lags.
        queues: dict[int, deque[Document]] = {stream: deque() for stream in starts}
        dealt = self._deal_from(starts, num_streams)

        def documents(stream: int) -> Iterator[Document]:
            while True:
                while not queues[stream]:
                    owner, document = next(dealt)
                    if owner in queues and document[:2] >= starts[owner]:
                        queues[owner].append(document)
                yield queues[stream].popleft()

        return {stream: documents(stream) for stream in starts}

    def _deal_from(self, starts: Mapping[int, tuple[int, int]], num_streams: int) -> Iterator[tuple[int, Document]]:
        """All documents with the stream that owns each, beginning shortly before the earliest start.

        The length of an epoch is unknown until it ends, so owners are counted on from a document whose owner is known.
        """
        first = min(starts, key=starts.__getitem__)
        epoch, index = starts[first]
        begin = max(0, index - first)
        owner = first - (index - begin)
        while True:
            index = begin
            for index, text in enumerate(self.documents(begin), begin + 1):
                yield owner, Document(epoch, index - 1, text)
                owner = (owner + 1) % num_streams
            if index == begin:
                raise ValueError(
                    f"training.dataset has no document number {begin}: it is empty, or shorter than it was when the "
                    "data position was saved. Resume with the same data."
                )
            epoch, begin = epoch + 1, 0


def text_of(record: Any, text_key: str, where: str) -> str:
    """The text of a record.

    Raises:
        ValueError: the record is not a mapping with a string under `text_key`.
    """
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        kinds = {key: type(value).__name__ for key, value in record.items()} if isinstance(record, dict) else {}
        raise ValueError(
            f"training.text_key = {text_key!r}: no text under this key in {where}, which has {kinds or 'no keys'}. "
            "Set training.text_key to a key that holds a string in every record."
        )
    return text


def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState and PCG64 promise the same numbers in every version of numpy, Generator does not.
    return np.random.RandomState(np.random.PCG64([seed, epoch])).permutation(length)
