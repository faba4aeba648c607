"""Corpora that are lists of texts, and ones that fail; a tokenizer of large ids.

A child process imports this file, so it goes without torch.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

from moe_titan.data.source import RandomAccessSource, StreamingSource
from moe_titan.data.tokenizer import ByteTokenizer

# Lengths from nothing to many samples, so that samples span several documents and documents several samples.
TEXTS = [f"<{i}>" + "xyz"[i % 3] * (i * 37 % 120) for i in range(37)] + ["", "é" * 300]


class ListSource(RandomAccessSource):
    def __init__(self, texts: list[str] = TEXTS) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def document(self, index: int) -> str:
        return self.texts[index]


class ListStream(StreamingSource):
    def __init__(self, texts: list[str] = TEXTS) -> None:
        self.texts = texts

    def documents(self, start: int) -> Iterator[str]:
        return iter(self.texts[start:])


class TwoPartError(Exception):
    """Is pickled as one argument and then not unpickled for want of the other."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{what} at {where}")


class Failing(ListSource):
    """Raises what it is given for every document."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def document(self, index: int) -> str:
        raise self.error


class RaisingTwoParts(ListSource):
    def document(self, index: int) -> str:
        raise TwoPartError("here", "nothing")


class Killing(ListSource):
    """Kills the process that reads the document with the longest text."""

    def document(self, index: int) -> str:
        if len(self.texts[index]) == 300:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().document(index)


class Stuck(ListSource):
    """Gives one document, of 42 tokens as bytes, and no other."""

    def document(self, index: int) -> str:
        if self.texts:
            self.texts = []
            return "x" * 40
        time.sleep(1000)
        raise AssertionError

    def __len__(self) -> int:
        return len(TEXTS)


class NamingModules(ListSource):
    """Raises the names of all modules that the reading process has imported."""

    def document(self, index: int) -> str:
        raise ValueError(" ".join(sys.modules))


class LargeIds(ByteTokenizer):
    eos_id = 2**63 - 1

    def encode(self, text: str) -> list[int]:
        return [256, self.eos_id]
