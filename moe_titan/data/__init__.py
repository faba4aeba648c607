"""Text to token batches: corpora, tokenizers, packing, and a loader whose batches do not depend on the layout."""

from moe_titan.data.corpora import build_source
from moe_titan.data.loader import IGNORED, DataLoader, MicroBatch, build_dataloader
from moe_titan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer

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
