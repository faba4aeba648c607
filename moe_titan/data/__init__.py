"""Text to token batches: corpora, tokenizers, packing, and a loader whose batches do not depend on the layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_titan.data.corpora import build_source
from moe_titan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from moe_titan.data.loader import IGNORED, DataLoader, MicroBatch, build_dataloader

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "DataLoader",
    "HuggingFaceTokenizer",
    "MicroBatch",
    "Tokenizer",
    "build_dataloader",
    "build_source",
    "build_tokenizer",
]


def __getattr__(name: str) -> Any:
    """What lies in `loader`. It imports torch, which the process that reads ahead does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("moe_titan.data.loader"), name)
