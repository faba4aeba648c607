"""Stable order of (token, choice) pairs by key, on the device and without a host sync.

A counting sort in blocks: count the keys of every block (the router does so itself), then add up what lies before each block and
place the block's pairs. Integer arithmetic throughout, so the order is the same on every run and device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op


def sort_pairs_reference(key_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_P = torch.argsort(key_P, stable=True)
    places_P = torch.arange(key_P.shape[0], device=key_P.device)
    ones_P = torch.ones_like(key_P, dtype=torch.int64)
    counts = torch.zeros(num_keys + 1, dtype=torch.int64, device=key_P.device).scatter_add_(0, key_P.long(), ones_P)[:num_keys]
    present_P = places_P < counts.sum()
    pair_P = torch.where(present_P, order_P, -1)
    row_P = torch.empty_like(order_P).scatter_(0, order_P, torch.where(present_P, places_P, -1))
    return pair_P.int(), row_P.int(), counts, counts.cumsum(0, dtype=torch.int32)


@triton.jit
def _count_kernel(key_ptr, counts_ptr, P, num_keys, BLOCK_P: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    p_P, bin_B = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BINS)
    key_P = tl.load(key_ptr + p_P, mask=p_P < P, other=num_keys).to(tl.int32)
    tl.store(counts_ptr + block * num_keys + bin_B, tl.histogram(key_P, BINS, mask=key_P < num_keys), mask=bin_B < num_keys)


@triton.jit
def _place_kernel(
    key_ptr, block_counts_ptr, pair_ptr, row_ptr, counts_ptr, offsets_ptr, P, num_keys, num_blocks, program_blocks, program_pairs,
    BLOCK_P: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Places the pairs of some consecutive blocks: sorts them by key, then moves each key's pairs to where they belong."""
    program = tl.program_id(0)
    i_P, c_C, bin_B = tl.arange(0, BLOCK_P), tl.arange(0, CHUNK), tl.arange(0, BINS)
    before_CB, here_CB = tl.zeros([CHUNK, BINS], tl.int32), tl.zeros([CHUNK, BINS], tl.int32)
    after_CB = tl.zeros([CHUNK, BINS], tl.int32)
    for first in range(0, num_blocks, CHUNK):
        b_C = first + c_C
        known_CB = (b_C < num_blocks)[:, None] & (bin_B < num_keys)[None, :]
        counts_CB = tl.load(block_counts_ptr + b_C[:, None] * num_keys + bin_B[None, :], mask=known_CB, other=0)
        owner_C1 = (b_C // program_blocks)[:, None]
        before_CB += tl.where(owner_C1 < program, counts_CB, 0)
        here_CB += tl.where(owner_C1 == program, counts_CB, 0)
        after_CB += tl.where(owner_C1 > program, counts_CB, 0)
    before_B, here_B = tl.sum(before_CB, axis=0), tl.sum(here_CB, axis=0)
    total_B = before_B + here_B + tl.sum(after_CB, axis=0)
    end_B = tl.cumsum(total_B, axis=0)
    if program == 0:
        tl.store(counts_ptr + bin_B, total_B.to(tl.int64), mask=bin_B < num_keys)
        tl.store(offsets_ptr + bin_B, end_B, mask=bin_B < num_keys)
    # From a pair's place among this program's sorted pairs to its place among all.
    shift_B = end_B - total_B + before_B - (tl.cumsum(here_B, axis=0) - here_B)
    left_out_shift = tl.sum(total_B) + (program * program_pairs - tl.sum(before_B)) - tl.sum(here_B)

    first_pair = program * program_pairs
    in_P = (i_P < program_pairs) & (first_pair + i_P < P)
    key_P = tl.load(key_ptr + first_pair + i_P, mask=in_P, other=num_keys).to(tl.int32)
    sorted_P = tl.sort(key_P * BLOCK_P + i_P)
    key_P, pair_P = sorted_P // BLOCK_P, first_pair + sorted_P % BLOCK_P
    kept_P = key_P < num_keys
    place_P = i_P + tl.where(kept_P, tl.gather(shift_B, tl.minimum(key_P, num_keys - 1), 0), left_out_shift)
    in_P = pair_P < tl.minimum(first_pair + program_pairs, P)
    tl.store(row_ptr + pair_P, tl.where(kept_P, place_P, -1), mask=in_P)
    tl.store(pair_ptr + place_P, tl.where(kept_P, pair_P, -1), mask=in_P)


def _launch_sort(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    P, key_P = key_P.shape[0], key_P.contiguous()
    bins = max(triton.next_power_of_2(num_keys), 16)
    if block_counts is None:
        block_pairs = 512
        block_counts = key_P.new_empty(max(triton.cdiv(P, block_pairs), 1), num_keys, dtype=torch.int32)
        _count_kernel[(len(block_counts),)](key_P, block_counts, P, num_keys, BLOCK_P=block_pairs, BINS=bins, num_warps=4)
    pair_P, row_P = (key_P.new_empty(P, dtype=torch.int32) for _ in range(2))
    counts, offsets = key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)
    # Every program reads all counts: several blocks each keep the programs few.
    blocks = len(block_counts)
    each = max(min(triton.cdiv(blocks, 256), 2048 // block_pairs), 1)
    _place_kernel[(max(triton.cdiv(blocks, each), 1),)](
        key_P, block_counts, pair_P, row_P, counts, offsets, P, num_keys, blocks, each, each * block_pairs,
        BLOCK_P=triton.next_power_of_2(each * block_pairs), BINS=bins, CHUNK=max(4096 // bins, 1), num_warps=4,
    )  # fmt: skip
    return pair_P, row_P, counts, offsets


@op("sort_pairs")
def _sort_pairs(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if key_P.is_cuda:
        return _launch_sort(key_P, num_keys, block_counts, block_pairs)
    return sort_pairs_reference(key_P, num_keys)


@torch.library.register_fake(_sort_pairs)
def _(key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair_P, row_P = torch.empty_like(key_P, dtype=torch.int32), torch.empty_like(key_P, dtype=torch.int32)
    return pair_P, row_P, key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)


def sort_pairs(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None = None, block_pairs: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable order of pairs by key.

    Args:
        key_P: [P] integers in [0, num_keys]; the key ``num_keys`` means "leave out".
        block_counts: how often each key but "leave out" occurs in every ``block_pairs`` consecutive pairs:
            [blocks, num_keys] int32; counted here if None.
    Returns:
        ``pair_P`` int32: the pairs in key order, those left out last and given as -1; ``row_P`` int32: each pair's place in
        that order, -1 for those left out; ``counts`` [num_keys] int64: pairs per key; ``offsets`` [num_keys] int32: where each
        key's pairs end.
    """
    return _sort_pairs(key_P, num_keys, block_counts, block_pairs)
