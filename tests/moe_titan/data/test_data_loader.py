"""The loader against a plain Python packing of the same documents, for every layout, and its resumption."""

from itertools import islice

import pytest
import torch
from list_sources import TEXTS, ListSource, ListStream

from moe_titan.data.loader import DataLoader
from moe_titan.data.source import Source
from moe_titan.data.tokenizer import ByteTokenizer

G, S, SEED = 8, 24, 5

SOURCES = pytest.mark.parametrize("source", [ListSource(), ListStream(), ListSource(TEXTS[:3]), ListStream(TEXTS[:3])])


def make_loader(source: Source, rank: int = 0, degree: int = 1, local: int = G, **options) -> DataLoader:
    sizes = {"seq_len": S, "local_batch_size": local, "global_batch_size": G, "seed": SEED} | options
    return DataLoader(source, ByteTokenizer(), dp_rank=rank, dp_degree=degree, **sizes)


def global_batches(loaders: list[DataLoader], steps: int) -> list[torch.Tensor]:
    """[G, 2, S] for each step: micro-batches after each other, within each the ranks after each other."""
    result = []
    for _ in range(steps):
        ranks = [loader.next_step() for loader in loaders]
        assert all(batch.valid_BS is None for batches in ranks for batch in batches)
        rows = [torch.stack(batch[:2], dim=1) for micro_batch in zip(*ranks, strict=True) for batch in micro_batch]
        result.append(torch.cat(rows))
    return result


def saved(loaders: list[DataLoader]) -> dict[str, torch.Tensor]:
    return {"position": sum(loader.state_dict()["position"] for loader in loaders)}


def all_ranks(source: Source, degree: int, local: int, **options) -> list[DataLoader]:
    return [make_loader(source, rank, degree, local, **options) for rank in range(degree)]


def reference_batches(source: Source, steps: int) -> list[torch.Tensor]:
    """Round-robin dealing and packing in lists. The order of the documents is that of a single stream."""
    order = source.deal({0: (0, 0)}, 1, SEED)[0]
    streams: list[list[int]] = [[] for _ in range(G)]
    while min(map(len, streams)) <= steps * S:
        for stream in streams:
            stream += [256, *next(order).text.encode(), 257]
    return [torch.tensor([[s[i * S : i * S + S], s[i * S + 1 : i * S + S + 1]] for s in streams]) for i in range(steps)]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for got_batch, expected_batch in zip(got, expected, strict=True):
        assert torch.equal(got_batch, expected_batch)


@SOURCES
@pytest.mark.parametrize("degree, local", [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)])
def test_global_batch_is_the_reference_for_every_layout(source: Source, degree: int, local: int) -> None:
    got = global_batches(all_ranks(source, degree, local), steps=20)  # several epochs
    assert_equal(got, reference_batches(source, steps=20))


@pytest.mark.parametrize("source", [ListSource(), ListStream()])
def test_every_token_is_predicted_once_per_epoch(source: Source) -> None:
    """Counts of labels over the steps of whole epochs, G = 1: all tokens, but the first and those of the cut tail."""
    loader = make_loader(source, local=1, global_batch_size=1)
    epochs, corpus = 3, [token for text in TEXTS for token in [256, *text.encode(), 257]]
    steps = epochs * len(corpus) // S
    labels = torch.cat([loader.next_step()[0].labels_BS.flatten() for _ in range(steps)])
    order = [document.text for document in islice(source.deal({0: (0, 0)}, 1, SEED)[0], epochs * len(TEXTS))]
    assert all(sorted(order[i : i + len(TEXTS)]) == sorted(TEXTS) for i in range(0, len(order), len(TEXTS)))
    expected = [token for text in order for token in [256, *text.encode(), 257]]
    assert labels.tolist() == expected[1 : steps * S + 1]
    assert len(expected) - len(labels) <= S


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int) -> list[str]:
        return [document.text for document in islice(ListSource().deal({0: (0, 0)}, 1, seed)[0], 2 * len(TEXTS))]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[: len(TEXTS)] != order(1)[len(TEXTS) :]


def test_order_is_the_same_on_every_machine_and_version() -> None:
    order = islice(ListSource([*"abcdefgh"]).deal({0: (0, 0)}, 1, 7)[0], 16)
    assert "".join(document.text for document in order) == "aghcefbdgdbacehf"


@SOURCES
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_on_other_data_ranks(source: Source, prefetch: int) -> None:
    """Saved after every step of several epochs, by 2 ranks; continued by 1 and by 4."""
    expected = reference_batches(source, steps=20)
    before = all_ranks(source, 2, 2, prefetch=prefetch)
    for step in range(16):
        state = saved(before)
        for degree, local in [(1, 4), (4, 1)]:
            after = all_ranks(source, degree, local)
            for loader in after:
                loader.load_state_dict(state)
            assert torch.equal(saved(after)["position"], state["position"])
            assert_equal(global_batches(after, steps=2), expected[step : step + 2])
        assert_equal(global_batches(before, steps=1), expected[step : step + 1])
    for loader in before:
        loader.close()


def test_position_of_other_ranks_streams_is_zero() -> None:
    loader = make_loader(ListSource(), rank=1, degree=2, local=2)
    global_batches([loader], steps=12)
    position = loader.state_dict()["position"]
    assert position.shape == (G, 3) and position.dtype == torch.int64
    assert position.any(dim=1).tolist() == [False, False, True, True] * 2


def test_rank_tokenizes_only_its_own_documents() -> None:
    read = []

    class Recording(ListSource):
        def document(self, index: int) -> str:
            read.append(index)
            return super().document(index)

    documents = {}
    for rank in range(2):
        loader = make_loader(Recording(), rank, 2, 4)
        for _ in range(2):
            loader.next_step()
        documents[rank], read = set(read), []
    assert documents[0] and documents[1] and not documents[0] & documents[1]


def test_wrong_sizes_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"training.global_batch_size = 8 .* multiple .* 3 x 2"):
        make_loader(ListSource(), degree=2, local=3)
    loader = make_loader(ListSource())
    global_batches([loader], steps=30)
    state = saved([loader])
    with pytest.raises(ValueError, match="training.global_batch_size = 4: .* Set training.global_batch_size = 8"):
        make_loader(ListSource(), local=4, global_batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="does not fit a corpus of 38 documents"):
        make_loader(ListSource(TEXTS[:-1])).load_state_dict(state)
    shorter = make_loader(ListSource(["" for _ in TEXTS]))
    shorter.load_state_dict(state)
    with pytest.raises(ValueError, match="lies past the 2 tokens"):
        shorter.next_step()
    stream = make_loader(ListStream(TEXTS[:2]))
    stream.load_state_dict({"position": torch.tensor([[0, 800 + g, 0] for g in range(G)])})
    with pytest.raises(ValueError, match="has no document number 800"):
        stream.next_step()


def test_fewer_documents_than_streams_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make_loader(ListSource(TEXTS[:3]))
    assert "3 documents for training.global_batch_size = 8" in caplog.text
