"""Documents to samples of one length, without padding."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from moe_titan.data.source import Document
from moe_titan.data.tokenizer import Tokenizer


class PackedStream:
    """The tokens of a stream's documents back to back, cut into samples of `seq_len + 1` tokens.

    The last token of a sample is the first of the next, so that every token of the stream but its first is predicted
    once.

    Attributes:
        position: (epoch, index of the document in the epoch, token in the document) where the next sample starts.
    """

    def __init__(self, documents: Iterator[Document], tokenizer: Tokenizer, seq_len: int, position: tuple[int, int, int]) -> None:
        self.position = position
        self._documents = documents
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._open: deque[tuple[Document, np.ndarray]] = deque()

    def next_sample(self) -> np.ndarray:
        """`seq_len + 1` token ids, int64.

        Raises:
            ValueError: the document at the position is shorter than it was when the position was saved.
        """
        offset, length = self.position[2], self._seq_len + 1
        available = sum(len(tokens) for _, tokens in self._open) - offset
        while available < length:
            document = next(self._documents)
            tokens = np.array(self._tokenizer.encode(document.text), np.int64)
            if not self._open and len(tokens) <= offset:
                raise ValueError(
                    f"The saved data position {self.position} (epoch, document, token) lies past the {len(tokens)} "
                    "tokens of its document: the data or the tokenizer was changed. Resume with the same ones."
                )
            self._open.append((document, tokens))
            available += len(tokens)
        first, *rest = (tokens for _, tokens in self._open)
        # Cut before joining: a document may be far longer than a sample.
        sample = np.concatenate([first[offset : offset + length], *(tokens[:length] for tokens in rest)])[:length]

        offset += self._seq_len
        while offset >= len(self._open[0][1]):
            offset -= len(self._open.popleft()[1])
        document = self._open[0][0]
        self.position = (document.epoch, document.number, offset)
        return sample
