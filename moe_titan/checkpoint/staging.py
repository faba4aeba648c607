"""A copy of a state in host memory, from which it is written while training goes on."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_titan.checkpoint.deferred import Deferred, placed_like
from parallelisms.sharding_plan import local

_ALIGNMENT = 64


class Staging:
    """Copies states whose tensors are alike from one call to the next.

    All of a rank's shards lie in one block, so that it is pinned at once and without the rounding of PyTorch's allocator. A GPU
    copies on a stream of its own, into pinned memory while it computes.

    Args:
        keep: keep the block from one state to the next, pinned where there is a GPU.
    """

    def __init__(self, keep: bool):
        self._keep = keep
        self._block: Tensor | None = None
        self._unpin: weakref.finalize | None = None
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with its tensors in host memory: there from the end of :meth:`wait` on, and until the next call.

        What is copied must not change before :meth:`hold`.
        """
        tensors = {key: _deferred(value) for key, value in state.items() if isinstance(value, Tensor | Deferred)}
        block = self._block_of(sum(map(_room, tensors.values())))
        self._copied = state  # Memory of the other stream must not be used again before it has been read.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        memory, staged, offset = memoryview(block.numpy()), dict(state), 0
        with torch.cuda.stream(self._stream):
            for key, tensor in tensors.items():
                copy = _part(memory, offset, tensor)
                copy.copy_(tensor.make(), non_blocking=True)
                staged[key] = placed_like(copy, tensor.placed)
                offset += _room(tensor)
        return staged

    def wait(self) -> None:
        """Until all has been copied."""
        if self._stream is not None:
            self._stream.synchronize()

    def hold(self) -> None:
        """Lets what the GPU is given from now on begin when all has been copied."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _block_of(self, size: int) -> Tensor:
        if self._block is not None and len(self._block) >= size:
            return self._block
        if self._unpin is not None:
            self._unpin()
        block = torch.empty(size, dtype=torch.uint8)
        if self._keep:
            self._block = block
            if torch.cuda.is_available():
                _pin(block)
                # What is freed while it is pinned would be taken for pinned by whoever gets the memory next.
                self._unpin = weakref.finalize(self, _unpin, block)
                self._unpin.atexit = False
        return block


def _deferred(value: Tensor | Deferred) -> Deferred:
    return value if isinstance(value, Deferred) else Deferred(value, value.dtype, partial(local, value))


def _part(memory: memoryview, offset: int, tensor: Deferred) -> Tensor:
    """Not a view of the whole, which a writer of storages would copy."""
    shape = local(tensor.placed).shape
    if not shape.numel():
        return torch.empty(shape, dtype=tensor.dtype)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=shape.numel(), offset=offset).view(shape)


def _room(tensor: Deferred) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pin(block: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)))


def _unpin(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
