"""Rows of many tensors one after the other in one block of memory, where each begins being known on the device alone."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op
from kernels.programs import programs


@triton.jit(do_not_specialize=["R"])
def _stash_rows_kernel(x_ptr, num_rows_ptr, block_ptr, first_ptr, C, R, size, BLOCK_C: tl.constexpr):
    first = tl.load(first_ptr)
    count = tl.minimum(tl.minimum(tl.load(num_rows_ptr), R), tl.maximum(size - first, 0))
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        for start in range(0, C, BLOCK_C):
            c_C = start + tl.arange(0, BLOCK_C)
            tl.store(block_ptr + (first + row) * C + c_C, tl.load(x_ptr + row * C + c_C, mask=c_C < C), mask=c_C < C)


def stash_rows_reference(x_RC: Tensor, num_rows: Tensor, block_AC: Tensor, first: Tensor) -> None:
    begin = int(first)
    count = min(int(num_rows), len(x_RC), max(len(block_AC) - begin, 0))
    block_AC[begin : begin + count] = x_RC[:count]


def _launch(x_RC: Tensor, num_rows: Tensor, block_AC: Tensor, first: Tensor) -> None:
    R, C = x_RC.shape
    if R:
        block = min(triton.next_power_of_2(C), 2048)
        _stash_rows_kernel[programs(R, x_RC.device)](
            x_RC.contiguous(), num_rows, block_AC, first, C, R, len(block_AC), BLOCK_C=block, num_warps=4
        )


@op("stash_rows", mutates_args=("block_AC",))
def stash_rows(x_RC: Tensor, num_rows: Tensor, block_AC: Tensor, first: Tensor) -> None:
    """Writes rows into a block, from a row of it on; those that reach beyond its end are left out.

    Args:
        x_RC: [R, C].
        num_rows: one-element integer tensor on the device: the rows of x that hold data.
        block_AC: [A, C] contiguous, of the same dtype.
        first: one-element int64 tensor on the device.
    """
    (_launch if x_RC.is_cuda else stash_rows_reference)(x_RC, num_rows, block_AC, first)
