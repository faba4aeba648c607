"""Reading ahead in a process gives what reading in the caller gives, fails as it does, and leaves no process behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from list_sources import TEXTS, Failing, Killing, LargeIds, ListSource, ListStream, NamingModules, RaisingTwoParts, Stuck

from moe_titan.data.corpora import JsonLines
from moe_titan.data.loader import DataLoader, MicroBatch
from moe_titan.data.source import Source
from moe_titan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "tests" / "assets" / "torchtitan" / "tokenizer"
G, S = 8, 24


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The processes that a test has started so far."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


def make_loader(source: Source, prefetch: int, local: int = 2, tokenizer: Tokenizer | None = None) -> DataLoader:
    sizes = {"seq_len": S, "local_batch_size": local, "global_batch_size": G, "dp_rank": 1, "dp_degree": 2, "seed": 5}
    return DataLoader(source, tokenizer or ByteTokenizer(), prefetch=prefetch, **sizes)


def assert_same(got: list[MicroBatch], expected: list[MicroBatch]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.tokens_BS, b.tokens_BS) and torch.equal(a.labels_BS, b.labels_BS)
        assert a.valid_BS is b.valid_BS is None


@pytest.mark.parametrize("prefetch, local", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("source", [ListSource(), ListStream(), ListSource(TEXTS[:3])])
def test_process_gives_the_same_batches_and_positions(source: Source, prefetch: int, local: int) -> None:
    """Batches are compared at the end, when the memory they came in has long been written again."""
    here, ahead = make_loader(source, 0, local), make_loader(source, prefetch, local)
    steps = []
    for _ in range(20):
        assert torch.equal(ahead.state_dict()["position"], here.state_dict()["position"])
        steps.append((ahead.next_step(), here.next_step()))
    for got, expected in steps:
        assert_same(got, expected)
    ahead.close()
    here.close()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_reload_reads_from_the_new_position_in_a_new_process(taken: int, children: list[subprocess.Popen]) -> None:
    here, ahead = make_loader(ListSource(), 0), make_loader(ListSource(), 2)
    for _ in range(4):
        here.next_step()
    for _ in range(taken):
        ahead.next_step()
    ahead.load_state_dict(here.state_dict())
    assert torch.equal(ahead.state_dict()["position"], here.state_dict()["position"])
    for _ in range(4):
        assert_same(ahead.next_step(), here.next_step())
    former, current = children
    assert former.wait(timeout=10) == -9
    assert current.poll() is None
    ahead.close()


def errors(source: Source, position: torch.Tensor | None = None) -> list[Exception]:
    """What reading raises without and with a process."""
    result = []
    for prefetch in (0, 2):
        loader = make_loader(source, prefetch)
        if position is not None:
            loader.load_state_dict({"position": position})
        with pytest.raises(Exception) as caught:  # noqa: B017
            for _ in range(20):
                loader.next_step()
        result.append(caught.value)
    return result


def test_record_without_text_is_named_by_the_same_error(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"body" if i == 29 else "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    here, ahead = errors(JsonLines([file], "text"))
    assert type(ahead) is type(here) is ValueError
    assert str(ahead) == str(here)
    assert "no text under this key in" in str(ahead)
    assert "in text_of" in ahead.__notes__[0]


def test_position_that_does_not_fit_is_named_by_the_same_error() -> None:
    position = torch.tensor([[0, g, 2] for g in range(G)])
    here, ahead = errors(ListSource([""] * len(TEXTS)), position)
    assert type(ahead) is type(here) is ValueError
    assert str(ahead) == str(here)
    assert "lies past the 2 tokens" in str(ahead)
    loader = make_loader(ListSource(), 2)
    with pytest.raises(ValueError, match="does not fit a corpus of 39 documents"):
        loader.load_state_dict({"position": position + torch.tensor([0, 1, 0])})
    assert_same(loader.next_step(), make_loader(ListSource(), 0).next_step())
    loader.close()


@pytest.mark.parametrize("error", [OSError(5, "no such host"), EOFError("cut"), UnicodeDecodeError("utf-8", b"a", 0, 1, "bad")])
def test_any_error_keeps_its_type_and_message(error: Exception) -> None:
    here, ahead = errors(Failing(error))
    assert type(ahead) is type(here) is type(error)
    assert str(ahead) == str(here) == str(error)


def test_error_that_cannot_be_pickled_is_quoted() -> None:
    with pytest.raises(RuntimeError, match="TwoPartError: nothing at here"):
        make_loader(RaisingTwoParts(), 1).next_step()


def test_after_an_error_there_is_nothing_to_wait_for() -> None:
    loader = make_loader(Failing(ValueError("unreadable")), 3)
    with pytest.raises(ValueError, match="unreadable"):
        loader.next_step()
    with pytest.raises(RuntimeError, match="has ended with exit code 0"):
        loader.next_step()


def test_death_of_the_process_is_an_error(children: list[subprocess.Popen]) -> None:
    """Killed when it has read ahead all that it may, and while a step is waited for."""
    loader = make_loader(ListSource(), 2)
    expected = make_loader(ListSource(), 0)
    assert_same(loader.next_step(), expected.next_step())
    children[0].kill()
    with pytest.raises(RuntimeError, match="exit code -9 .* training.dataloader.num_workers = 0"):
        for _ in range(3):
            assert_same(loader.next_step(), expected.next_step())
    loader = make_loader(Killing(), 2)
    with pytest.raises(RuntimeError, match="exit code -9"):
        for _ in range(60):
            loader.next_step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_the_parents_to_handle(children: list[subprocess.Popen], number: signal.Signals) -> None:
    loader = make_loader(ListSource(), 2)
    children[0].send_signal(number)  # before it is up
    loader.next_step()
    children[0].send_signal(number)
    for _ in range(4):
        loader.next_step()
    loader.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


@pytest.mark.parametrize("source", [ListSource(), Stuck()])
def test_close_waits_for_nothing(source: Source, children: list[subprocess.Popen]) -> None:
    loader = make_loader(source, 2)
    begin = time.perf_counter()
    loader.close()
    assert time.perf_counter() - begin < 1
    assert children[0].wait(timeout=10) == -9


def test_a_loader_that_is_dropped_ends_its_process(children: list[subprocess.Popen]) -> None:
    make_loader(ListSource(), 2).next_step()
    children[0].wait(timeout=10)


@pytest.mark.parametrize("source", ["ListSource", "Stuck"])
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_the_process_ends_with_its_parent(source: str, end: str) -> None:
    """Also where it waits for data. The child holds the parent's output open: reading that to its end waits for both."""
    code = f"""
import os, sys
import numpy as np
from list_sources import {source}
from moe_titan.data.read_ahead import ReadAhead
from moe_titan.data.reader import Reader
from moe_titan.data.tokenizer import ByteTokenizer
reader = Reader({source}(), ByteTokenizer(), {S}, 5, 1, np.array([[0]]))
ahead = ReadAhead(reader, np.zeros((1, 3), np.int64), 2)
next(ahead)
print("once")
{end}
"""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert result.returncode == {"": 0, "sys.exit(3)": 3, "1 / 0": 1}.get(end, -9)
    assert result.stdout == "once\n"
    assert ("ZeroDivisionError" in result.stderr) if "/" in end else not result.stderr


def test_the_process_imports_little() -> None:
    loader = make_loader(NamingModules(), 1, tokenizer=HuggingFaceTokenizer(str(TOKENIZER)))
    with pytest.raises(ValueError, match="moe_titan.data.read_ahead") as caught:
        loader.next_step()
    names = {*str(caught.value).split()}
    assert {"list_sources", "numpy", "tokenizers"} <= names
    assert not {"torch", "torchtitan", "datasets", "moe_titan.data.loader", "moe_titan.config"} & names


def test_any_int64_is_an_id() -> None:
    loader = make_loader(ListSource(), 1, tokenizer=LargeIds())
    assert max(batch.tokens_BS.max().item() for batch in loader.next_step()) == 2**63 - 1
    loader.close()
