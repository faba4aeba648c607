"""A copy of a state in host memory, from which it is written while training goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.sharding_plan import local

_ALIGNMENT = 64


class Staging:
    """Copies states whose tensors are alike from one call to the next.

    All of a rank's shards lie in one block, so that it is pinned at once and without the rounding of PyTorch's allocator.

    Args:
        keep: keep the block from one state to the next, pinned where there is a GPU.
    """

    def __init__(self, keep: bool):
        self._keep = keep
        self._block: Tensor | None = None

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with its tensors in host memory, where they stay as they are until the next call."""
        shards = {key: local(value) for key, value in state.items() if isinstance(value, Tensor)}
        block = self._block_of(sum(_room(shard) for shard in shards.values()))
        staged, offset = dict(state), 0
        for key, shard in shards.items():
            copy = block[offset : offset + shard.nbytes].view(shard.dtype).view(shard.shape)
            copy.copy_(shard, non_blocking=True)
            offset += _room(shard)
            value = state[key]
            # DTensor.from_local would take it back to the mesh's device.
            staged[key] = DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def _block_of(self, size: int) -> Tensor:
        if self._block is not None and len(self._block) >= size:
            return self._block
        block = torch.empty(size, dtype=torch.uint8)
        if self._keep:
            self._block = _pinned(block)
        return block


def _room(shard: Tensor) -> int:
    return -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pinned(block: Tensor) -> Tensor:
    """Pins the memory itself, for the rest of the process."""
    if torch.cuda.is_available():
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)))
    return block
