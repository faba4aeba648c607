"""Tokenizers: round trips, special tokens, errors."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moe_titan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer

ASSETS = Path(__file__).parents[2] / "assets" / "torchtitan" / "tokenizer"
TEXT = "Grüße, 世界! 🙂\n\tdef f(x):  return x\r\n\0"


@pytest.fixture
def bpe_folder(tmp_path: Path) -> Path:
    """A byte-level BPE in Hugging Face's files; its post-processor adds a bos by itself, as Llama 3's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, add_bos_token=True)
    return tmp_path


def write_config(folder: Path, **entries) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def config(tokenizer: str, folder: Path | str = "") -> SimpleNamespace:
    return SimpleNamespace(training=SimpleNamespace(tokenizer=tokenizer), model=SimpleNamespace(hf_assets_path=str(folder)))


def test_bytes() -> None:
    tokenizer = build_tokenizer(config("byte"))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("aé") == [256, 97, 0xC3, 0xA9, 257]
    assert tokenizer.decode([*tokenizer.encode(TEXT), tokenizer.pad_id]) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)


@pytest.mark.parametrize("kind", ["auto", "huggingface"])
def test_hugging_face_folder(bpe_folder: Path, kind: str) -> None:
    tokenizer = build_tokenizer(config(kind, bpe_folder))
    ids = tokenizer.encode(TEXT)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert ids.count(0) == ids.count(1) == 1
    assert max(ids) < tokenizer.vocab_size <= 300
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.pad_id == tokenizer.eos_id  # the folder names no pad token


def test_without_bos_and_with_one_token_for_both(bpe_folder: Path) -> None:
    write_config(bpe_folder, bos_token=None, eos_token="</s>")
    tokenizer = HuggingFaceTokenizer(str(bpe_folder))
    assert tokenizer.bos_id is None
    assert tokenizer.encode("x")[0] != 0 and tokenizer.encode("x")[-1] == 1
    write_config(bpe_folder, bos_token="</s>", eos_token="</s>", pad_token="<s>")
    tokenizer = HuggingFaceTokenizer(str(bpe_folder))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 1, 0)
    assert tokenizer.encode("x")[0] == tokenizer.encode("x")[-1] == 1


def test_torchtitan_test_tokenizer() -> None:
    tokenizer = HuggingFaceTokenizer(str(ASSETS))
    ids = tokenizer.encode("hello world")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert max(ids) < tokenizer.vocab_size <= 2048
    assert tokenizer.decode(ids).replace(" ", "") == "helloworld"


def test_errors(bpe_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training.tokenizer = 'bytes': allowed are \"auto\""):
        build_tokenizer(config("bytes"))
    with pytest.raises(ValueError, match="model.hf_assets_path = '/no/folder': .* does not exist.*training.tokenizer"):
        build_tokenizer(config("auto", "/no/folder"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model.hf_assets_path = .*empty.*tokenizer.json"):
        build_tokenizer(config("auto", tmp_path / "empty"))
    write_config(bpe_folder, bos_token="<s>")
    with pytest.raises(ValueError, match="names no eos_token"):
        build_tokenizer(config("auto", bpe_folder))
