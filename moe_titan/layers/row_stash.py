"""One block of memory for what the experts of all layers keep until backward.

Where rows have fixed room for all that can arrive, what a layer keeps is as large as its worst case, of which a fraction holds
data. Loads of single layers are far from even, but a rank's sum over the layers is not: a block for all of them needs little more
than the even share. Megatron-Core calls it paged stashing (arXiv 2603.07685).
"""

import torch
from torch import Tensor

from kernels.expert_mlp import Kept
from kernels.stash import stash_rows
from parallelisms.dispatch.capacity import RowCapacity


class RowStash:
    """Rows of one micro-batch, layer after layer; forward fills it, backward reads it, and the next :meth:`clear` empties it.

    Rows that do not fit are left out, and ``capacity`` takes note of it; while its bounds are lifted nothing is stashed.

    Args:
        size: room for so many bytes, of all layers together; a row of any layer fits in.
    """

    def __init__(self, size: int, capacity: RowCapacity):
        self._size, self._capacity = size, capacity
        capacity.noted = True
        self._block: Tensor | None = None
        self._end: Tensor | None = None

    def clear(self) -> None:
        if self._end is not None:
            self._end.zero_()

    def stash(self, rows: Tensor, num_rows: Tensor) -> Kept | None:
        """See :func:`kernels.expert_mlp.expert_mlp`. A layer's rows are alike in size and dtype."""
        if self._capacity.is_lifted:
            return None
        if self._block is None:
            self._block = rows.new_empty(self._size, dtype=torch.uint8)
            self._end = torch.zeros(1, dtype=torch.int64, device=rows.device)
        width = row_bytes(rows)
        room = self._size // width
        block = self._block[: room * width].view(rows.dtype).view(room, *rows.shape[1:])
        first = (self._end + width - 1) // width  # behind a layer whose rows have another width, too
        stash_rows(rows.flatten(1), num_rows, block.flatten(1), first)
        end = first + num_rows
        self._capacity.note(end > room)
        self._end = end * width
        return Kept(block, first)


def row_bytes(rows: Tensor) -> int:
    return rows.itemsize * rows.shape[1:].numel()
