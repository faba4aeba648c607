"""Rows of several kinds in one block of memory."""

import torch

from moe_titan.layers.row_stash import RowStash, row_bytes
from parallelisms.dispatch.capacity import RowCapacity

NUMBERS, WORDS = torch.randn(7, 2, 3).bfloat16(), torch.randint(1 << 30, (7, 16), dtype=torch.int32)


def stashed(size: int) -> tuple[list[bool], bool]:
    """Whether each layer's rows are there once all are, in two passes, and whether some did not fit."""
    capacity = RowCapacity(None, torch.device("cpu"))
    stash, found = RowStash(size, capacity), []
    for _ in range(2):
        stash.clear()
        layers = [(NUMBERS, 4), (WORDS, 3), (WORDS + 1, 0), (NUMBERS + 1, 7), (WORDS + 2, 1)]
        kept = [stash.stash(rows, torch.tensor([count])) for rows, count in layers]
        for (rows, count), (block, first) in zip(layers, kept, strict=True):
            found.append(torch.equal(block[first : first + count], rows[:count]))
    return found, bool(capacity._exceeded)


def test_layers_of_several_widths_share_a_block() -> None:
    """Each layer begins at a multiple of its width: 4 x 12 bytes, 3 x 64 from 64 on, 7 x 12 from 264 on, 64 from 384 on."""
    assert (row_bytes(NUMBERS), row_bytes(WORDS)) == (12, 64)
    assert stashed(448) == ([True] * 10, False)
    found, exceeded = stashed(447)
    assert exceeded and found == [True, True, True, True, False] * 2
