"""Every kind of corpus, read through the loader and document by document."""

import json
import sysconfig
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from moe_titan.data.corpora import CutTextFile, JsonLines, TextFiles, build_source, stdlib_files
from moe_titan.data.hugging_face import MappedDataset, StreamedDataset
from moe_titan.data.loader import DataLoader, build_dataloader
from moe_titan.data.source import RandomAccessSource, Source
from moe_titan.data.tokenizer import ByteTokenizer

TEXTS = [f"text {i} " + "grün\n" * i for i in range(23)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def training(dataset: str, path: Path | None = None, **entries) -> SimpleNamespace:
    defaults = {"dataset_config": None, "dataset_split": "train", "text_key": "text"}
    return SimpleNamespace(dataset=dataset, dataset_path=path and str(path), **defaults | entries)


def write_json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(path: Path, texts: list[str], **columns) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), **columns}), path, row_group_size=3
    )
    return path


def texts_of(source: Source) -> list[str]:
    assert isinstance(source, RandomAccessSource)
    return [source.document(i) for i in range(len(source))]


def test_stdlib() -> None:
    source, files = build_source(training("stdlib")), stdlib_files()
    names = [file.relative_to(sysconfig.get_path("stdlib")).as_posix() for file in files]
    assert {"argparse.py", "json/decoder.py"} <= {*names}
    assert not [name for name in names if {"site-packages", "test", "tests"} & {*name.split("/")}]
    assert names == sorted(names)
    assert len(source) == len(files) > 300
    assert sum(file.stat().st_size for file in files) > 5e6
    index = next(i for i, file in enumerate(files) if file.name == "argparse.py")
    assert source.document(index) == files[index].read_text()


def test_text_folder_is_a_document_per_file(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        file = tmp_path / f"d{i % 3}" / f"{i:02}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "latin.md").write_bytes(b"gr\xfcn")
    source = build_source(training("text", tmp_path))
    assert isinstance(source, TextFiles)
    assert texts_of(source) == [text for d in range(3) for text in TEXTS[d::3]] + ["gr\ufffdn"]


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 10**6])
def test_text_file_is_cut_at_line_ends(tmp_path: Path, piece_bytes: int) -> None:
    file = tmp_path / "one.txt"
    text = "".join(TEXTS) + "no line end"
    file.write_text(text)
    pieces = texts_of(CutTextFile(file, piece_bytes))
    assert "".join(pieces) == text
    assert len(pieces) == -(-len(text.encode()) // piece_bytes)
    *cut, last = filter(None, pieces)
    assert all(piece.endswith("\n") for piece in cut) and last.endswith("no line end")
    assert isinstance(build_source(training("text", file)), CutTextFile)
    file.write_text("123456\n" * 5)
    assert texts_of(CutTextFile(file, 7)) == ["123456\n"] * 5


def test_json_lines(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", TEXTS[:9])
    write_json_lines(tmp_path / "b" / "c.json", TEXTS[9:])
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write('\n\r\n{"text": "half \\ud83d surrogate"}')  # blank lines, no line end
    (tmp_path / "notes.txt").write_text("not JSON")
    source = build_source(training("json", tmp_path))
    assert texts_of(source) == [*TEXTS[:9], "half ? surrogate", *TEXTS[9:]]
    assert texts_of(build_source(training("json", tmp_path / "b" / "c.json"))) == TEXTS[9:]
    other = write_json_lines(tmp_path / "d.jsonl", TEXTS, key="content")
    assert texts_of(build_source(training("json", other, text_key="content"))) == TEXTS


def test_c4_test_is_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json_lines(tmp_path / "tests/assets/c4_test/data.json", TEXTS)
    monkeypatch.chdir(tmp_path)
    assert texts_of(build_source(training("c4_test"))) == TEXTS
    assert texts_of(build_source(training("c4_test", tmp_path / "tests/assets/c4_test"))) == TEXTS


def test_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS[:9], number=list(range(9)))
    write_parquet(tmp_path / "b.parquet", TEXTS[9:], number=["x"] * 14)  # of no interest, so no clash of types
    assert texts_of(build_source(training("parquet", tmp_path))) == TEXTS
    assert texts_of(build_source(training("parquet", tmp_path / "a.parquet"))) == TEXTS[:9]


def test_hugging_face_folder(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "train.jsonl", TEXTS)
    write_json_lines(tmp_path / "test.jsonl", ["held out"])
    source = build_source(training("me/mine", tmp_path))
    assert isinstance(source, MappedDataset)
    assert texts_of(source) == TEXTS
    assert texts_of(build_source(training("me/mine", tmp_path, dataset_split="test"))) == ["held out"]


def test_streamed_dataset_gives_the_documents_in_order_from_anywhere(tmp_path: Path) -> None:
    files = [str(write_json_lines(tmp_path / f"{i}.jsonl", TEXTS[i::2])) for i in range(2)]
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    assert isinstance(dataset, datasets.IterableDataset)
    source, order = StreamedDataset(dataset, "text"), TEXTS[0::2] + TEXTS[1::2]
    for start in (0, 1, 12, 22, 23):
        assert list(source.documents(start)) == order[start:]
    streams = source.deal({1: (0, 1), 2: (0, 5)}, 3, seed=0)
    for stream, first in ((2, 5), (1, 1)):
        got = [document.text for document in islice(streams[stream], 20)]
        assert got == [order[i % len(TEXTS)] for i in range(first, first + 60, 3)]


@pytest.mark.parametrize(
    "name, path, expected",
    [
        ("c4", None, ("allenai/c4", "en", "train")),
        ("c4_validation", None, ("allenai/c4", "en", "validation")),
        ("c4", Path("/copies/c4"), ("/copies/c4", "en", "train")),
        ("owner/name", None, ("owner/name", None, "train")),
    ],
)
def test_hub_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch, name: str, path: Path | None, expected) -> None:
    calls = []

    def load_dataset(path: str, *, name: str | None, split: str, streaming: bool) -> datasets.IterableDataset:
        calls.append((path, name, split, streaming))
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = build_source(training(name, path))
    assert isinstance(source, StreamedDataset)
    assert calls == [(*expected, True)]
    assert list(source.documents(0)) == TEXTS


@pytest.mark.parametrize("kind", ["stdlib", "json", "parquet", "text", "me/mine", "c4"])
def test_loader_of_each_corpus_reads_the_same_in_a_process_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_json_lines(tmp_path / "train" / "a.json", TEXTS)
    write_parquet(tmp_path / "train" / "a.parquet", TEXTS)
    if kind == "c4":  # has another configuration than local files
        load_dataset, files = datasets.load_dataset, str(tmp_path / "train" / "a.json")
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, name, **options: load_dataset("json", data_files=files, **options)
        )
    elif kind == "me/mine":
        (tmp_path / "train" / "a.parquet").unlink()

    def loader(workers: int) -> DataLoader:
        dataloader = SimpleNamespace(num_workers=workers, pin_memory=False, prefetch_factor=None)
        sizes = {"seq_len": 16, "local_batch_size": 2, "global_batch_size": 4, "dataloader": dataloader}
        config = SimpleNamespace(training=training(kind, tmp_path, **sizes), debug=SimpleNamespace(seed=3))
        return build_dataloader(config, build_source(config.training), ByteTokenizer(), dp_rank=0, dp_degree=1)

    here, ahead = loader(0), loader(1)
    for step in range(14):
        if step == 7:
            ahead.close()
            ahead = loader(1)
            ahead.load_state_dict(here.state_dict())
        for a, b in zip(ahead.next_step(), here.next_step(), strict=True):
            assert torch.equal(a.tokens_BS, b.tokens_BS) and torch.equal(a.labels_BS, b.labels_BS)
        assert torch.equal(ahead.state_dict()["position"], here.state_dict()["position"])
    ahead.close()


@pytest.mark.parametrize("dataset", ["text", "json", "parquet"])
def test_missing_files_are_named(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(ValueError, match=f"training.dataset_path is not set.*training.dataset = '{dataset}'"):
        build_source(training(dataset))
    with pytest.raises(ValueError, match="training.dataset_path = .*nowhere' does not exist"):
        build_source(training(dataset, tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="training.dataset_path = .* holds no file to train on"):
        build_source(training(dataset, tmp_path))


def test_wrong_records_are_named(tmp_path: Path) -> None:
    file = write_json_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"training.text_key = 'body'.*a.jsonl, byte 0.*'text': 'str'"):
        build_source(training("json", file, text_key="body"))
    with pytest.raises(ValueError, match="training.text_key = 'id': no text"):
        build_source(training("json", file, text_key="id"))
    file.write_text("\n\n")
    with pytest.raises(ValueError, match="no JSON object in .*a.jsonl"):
        build_source(training("json", file))
    file.write_text('{"text": "fine"}\n[1, 2]\n{"text": \n')
    source = JsonLines([file], "text")
    with pytest.raises(ValueError, match="byte 17, which has no keys"):
        source.document(1)
    with pytest.raises(ValueError, match="byte 24: not one JSON object on a line"):
        source.document(2)


def test_wrong_tables_are_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(ValueError, match="training.dataset = 'parquet'.*text_key = 'body'.*No match for FieldRef"):
        build_source(training("parquet", file, text_key="body"))
    file.write_text("junk")
    with pytest.raises(ValueError, match="training.dataset = 'parquet'.*a.parquet.*Parquet file size is 4 bytes"):
        build_source(training("parquet", file))
    write_parquet(file, [])
    with pytest.raises(ValueError, match="a.parquet.*no data"):
        build_source(training("parquet", file))
    write_parquet(tmp_path / "b.parquet", TEXTS)
    assert texts_of(build_source(training("parquet", tmp_path))) == TEXTS
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="training.dataset = 'me/mine'.*folder.* finds no such data"):
        build_source(training("me/mine", tmp_path / "folder"))
    write_json_lines(tmp_path / "folder" / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match="dataset_split = 'train.:0.'.*no data"):
        build_source(training("me/mine", tmp_path / "folder", dataset_split="train[:0]"))
    with pytest.raises(ValueError, match="training.text_key = 'body'.* one of .'id', 'text'"):
        build_source(training("me/mine", tmp_path / "folder", text_key="body"))
    stream = StreamedDataset(datasets.Dataset.from_dict({"text": [None]}).to_iterable_dataset(), "text")
    with pytest.raises(ValueError, match="training.text_key = 'text'.*record 0"):
        next(stream.documents(0))
