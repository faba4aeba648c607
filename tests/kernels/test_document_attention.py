"""Documents of a batch and attention within them, beside loops over documents."""

import pytest
import torch

from kernels.document_attention import TILE, document_attention, find_documents, supports_widths


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def spans(begins_BS: torch.Tensor) -> list[tuple[int, int]]:
    """First and last token of every document, counted through the batch."""
    begins_BS = begins_BS.clone()
    begins_BS[:, 0] = True
    firsts = begins_BS.flatten().nonzero().flatten().tolist()
    return list(zip(firsts, [first - 1 for first in firsts[1:]] + [begins_BS.numel() - 1], strict=True))


@pytest.mark.parametrize(
    ("B", "S", "likely"), [(1, 1, 0.0), (3, 7, 0.0), (3, 7, 1.0), (2, 300, 0.02), (4, 129, 0.3), (1, 1000, 0.0)]
)
def test_documents_are_found(B, S, likely) -> None:
    begins_BS = torch.rand(B, S) < likely
    first_T, last_T, slot = find_documents(begins_BS)
    for first, last in spans(begins_BS):
        assert (first_T[first : last + 1] == first).all() and (last_T[first : last + 1] == last).all()
    # Every pair of a tile of queries and one of keys that it may see has a place of its own, and none is left empty.
    edges = range(0, B * S, TILE)
    places = [slot[m // TILE].item() - n for m in edges for n in range(first_T[m].item() // TILE, m // TILE + 1)]
    assert sorted(places) == list(range(len(places)))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_within_documents(key_heads) -> None:
    B, H, S, D, DV, scale = 2, 4, 23, 12, 8, 0.3
    q, k, v = (torch.randn(B, heads, S, n, dtype=torch.float64) for heads, n in ((H, D), (key_heads, D), (key_heads, DV)))
    begins_BS = torch.rand(B, S) < 0.2
    out_BHSD = document_attention(q, k, v, find_documents(begins_BS), scale)
    for first, last in spans(begins_BS):
        b, tokens = first // S, slice(first % S, last % S + 1)
        for h in range(H):
            h_k = h // (H // key_heads)
            scores = scale * q[b, h, tokens] @ k[b, h_k, tokens].t()
            weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(1)
            torch.testing.assert_close(out_BHSD[b, h, tokens], weights @ v[b, h_k, tokens])


@pytest.mark.parametrize(
    ("q_width", "v_width", "supported"),
    [
        *((192, 128, True), (128, 128, True), (96, 64, True), (16, 16, True), (80, 128, True)),
        *(
            (256, 128, False),
            (128, 256, False),
            (24, 16, False),
            (72, 64, False),
            (112, 64, False),
            (64, 96, False),
            (8, 8, False),
        ),
    ],
)
def test_widths_of_heads(q_width, v_width, supported) -> None:
    assert supports_widths(q_width, v_width) == supported
