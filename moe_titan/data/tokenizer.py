"""Text to token ids and back, behind one small interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moe_titan.config import Config


class Tokenizer(Protocol):
    """`vocab_size` is one more than the largest id; `bos_id` is None where documents do not start with a token."""

    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of one document: [bos] text eos."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without bos, eos and padding."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), then bos, eos and pad."""

    vocab_size = 259
    bos_id: int | None = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str) -> list[int]:
        return [256, *text.encode(), 257]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer files of a Hugging Face model folder (`tokenizer.json`, `tokenizer_config.json`).

    Special tokens are looked up here because torchtitan finds no eos where bos and eos are the same token.

    Raises:
        ValueError: the folder or a file is missing, or `tokenizer_config.json` names no eos token.
    """

    def __init__(self, folder: str) -> None:
        # It brings torch along, which the process that reads ahead does without.
        from torchtitan.components import tokenizer as torchtitan_tokenizer

        try:
            loaded = torchtitan_tokenizer.HuggingFaceTokenizer(folder)
        except FileNotFoundError as error:
            raise ValueError(
                f"model.hf_assets_path = {folder!r}: {error}. Set it to a folder with a Hugging Face tokenizer.json "
                'and tokenizer_config.json, or set training.tokenizer = "byte".'
            ) from error
        self._tokenizer = loaded.tokenizer
        self._config: dict = loaded.config or {}
        self.vocab_size = max(loaded.get_vocab().values()) + 1
        self.bos_id = self._special_id("bos_token")
        eos_id = self._special_id("eos_token")
        if eos_id is None:
            raise ValueError(
                f"model.hf_assets_path = {folder!r}: tokenizer_config.json names no eos_token of the vocabulary, and "
                "documents are told apart by it. Add the entry, or choose another tokenizer."
            )
        self.eos_id = eos_id
        pad_id = self._special_id("pad_token")
        self.pad_id = eos_id if pad_id is None else pad_id

    def _special_id(self, key: str) -> int | None:
        token = self._config.get(key)
        if isinstance(token, dict):
            token = token["content"]
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        bos = [] if self.bos_id is None else [self.bos_id]
        return [*bos, *self._tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids))


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that `training.tokenizer` asks for: "byte", or "huggingface" (also "auto") from
    `model.hf_assets_path`.

    Raises:
        ValueError: an unknown kind, or see `HuggingFaceTokenizer`.
    """
    kind = config.training.tokenizer
    if kind == "byte":
        return ByteTokenizer()
    if kind in ("auto", "huggingface"):
        return HuggingFaceTokenizer(config.model.hf_assets_path)
    raise ValueError(f'training.tokenizer = {kind!r}: allowed are "auto", "byte" and "huggingface".')
