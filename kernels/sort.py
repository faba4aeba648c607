"""Stable order of (token, choice) pairs by key, on the device and without a host sync.

A counting sort in blocks: count the keys of every block (the router does so itself), add up what lies before each block, place
each block's pairs. Integer arithmetic throughout, so the order is the same on every run and device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    p_P = block * BLOCK_P + tl.arange(0, BLOCK_P)
    # Pairs past the end land in the last bin, which stands for "left out"; their places lie past the end, too.
    key_P = tl.load(key_ptr + p_P, mask=p_P < P, other=num_keys).to(tl.int32)
    bin_B = tl.arange(0, BINS)
    tl.store(counts_ptr + block * (num_keys + 1) + bin_B, tl.histogram(key_P, BINS), mask=bin_B <= num_keys)


@triton.jit
def _scan_kernel(counts_ptr, before_ptr, total_ptr, num_bins, num_blocks, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """For every block and key of a slice of the keys, how many pairs of the key lie in earlier blocks; and each key's total."""
    bin_B, c_C = tl.program_id(0) * BINS + tl.arange(0, BINS), tl.arange(0, CHUNK)
    total_B = tl.zeros([BINS], tl.int32)
    for first in range(0, num_blocks, CHUNK):
        b_C = first + c_C
        known_CB = (b_C < num_blocks)[:, None] & (bin_B < num_bins)[None, :]
        place_CB = b_C[:, None] * num_bins + bin_B[None, :]
        counts_CB = tl.load(counts_ptr + place_CB, mask=known_CB, other=0)
        tl.store(before_ptr + place_CB, tl.cumsum(counts_CB, axis=0) - counts_CB + total_B[None, :], mask=known_CB)
        total_B += tl.sum(counts_CB, axis=0)
    tl.store(total_ptr + bin_B, total_B, mask=bin_B < num_bins)


@triton.jit
def _place_kernel(
    key_ptr, before_ptr, total_ptr, pair_ptr, row_ptr, counts_ptr, offsets_ptr, P, num_keys, block_pairs,
    BLOCK_P: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i_P, c_C, bin_B = tl.arange(0, BLOCK_P), tl.arange(0, CHUNK), tl.arange(0, BINS)
    total_B = tl.load(total_ptr + bin_B, mask=bin_B <= num_keys, other=0)
    if block == 0:
        tl.store(counts_ptr + bin_B, total_B.to(tl.int64), mask=bin_B < num_keys)
        tl.store(offsets_ptr + bin_B, tl.cumsum(total_B, axis=0), mask=bin_B < num_keys)
    p_P = block * block_pairs + i_P
    in_P = (i_P < block_pairs) & (p_P < P)
    key_P = tl.load(key_ptr + p_P, mask=in_P, other=num_keys).to(tl.int32)
    place_P = tl.load(before_ptr + block * (num_keys + 1) + key_P)
    place_P += tl.sum(tl.where(bin_B[None, :] < key_P[:, None], total_B[None, :], 0), axis=1)
    for first in range(0, BLOCK_P, CHUNK):
        j_C = first + c_C
        q_C = block * block_pairs + j_C
        other_C = tl.load(key_ptr + q_C, mask=(j_C < block_pairs) & (q_C < P), other=num_keys).to(tl.int32)
        earlier_PC = (key_P[:, None] == other_C[None, :]) & (j_C[None, :] < i_P[:, None])
        place_P += tl.sum(earlier_PC.to(tl.int32), axis=1)
    left_out_P = key_P == num_keys
    tl.store(row_ptr + p_P, tl.where(left_out_P, -1, place_P), mask=in_P)
    tl.store(pair_ptr + place_P, tl.where(left_out_P, -1, p_P), mask=in_P)


def _launch_sort(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    P, key_P = key_P.shape[0], key_P.contiguous()
    bins = triton.next_power_of_2(num_keys + 1)
    if block_counts is None:
        block_pairs = 128
        block_counts = key_P.new_empty(max(triton.cdiv(P, block_pairs), 1), num_keys + 1, dtype=torch.int32)
        _count_kernel[(len(block_counts),)](key_P, block_counts, P, num_keys, BLOCK_P=block_pairs, BINS=bins, num_warps=4)
    blocks, group = len(block_counts), min(bins, 16)
    before, total = torch.empty_like(block_counts), key_P.new_empty(num_keys + 1, dtype=torch.int32)
    pair_P, row_P = (key_P.new_empty(P, dtype=torch.int32) for _ in range(2))
    counts, offsets = key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)
    chunk = min(triton.next_power_of_2(blocks), 512)
    _scan_kernel[(triton.cdiv(num_keys + 1, group),)](
        block_counts, before, total, num_keys + 1, blocks, CHUNK=chunk, BINS=group, num_warps=4
    )
    _place_kernel[(blocks,)](
        key_P, before, total, pair_P, row_P, counts, offsets, P, num_keys, block_pairs,
        BLOCK_P=triton.next_power_of_2(block_pairs), BINS=bins, CHUNK=32, num_warps=4,
    )  # fmt: skip
    return pair_P, row_P, counts, offsets


@torch.library.custom_op("moe_titan::sort_pairs", mutates_args=())
def _sort_pairs(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if key_P.is_cuda:
        return _launch_sort(key_P, num_keys, block_counts, block_pairs)
    return sort_pairs_reference(key_P, num_keys)


@_sort_pairs.register_fake
def _(key_P: Tensor, num_keys: int, block_counts: Tensor | None, block_pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair_P, row_P = torch.empty_like(key_P, dtype=torch.int32), torch.empty_like(key_P, dtype=torch.int32)
    return pair_P, row_P, key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)


def sort_pairs(
    key_P: Tensor, num_keys: int, block_counts: Tensor | None = None, block_pairs: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable order of pairs by key.

    Args:
        key_P: [P] integers in [0, num_keys]; the key ``num_keys`` means "leave out".
        block_counts: how often each key, the last being "leave out", occurs in every ``block_pairs`` consecutive pairs:
            [blocks, num_keys + 1] int32; counted here if None.
    Returns:
        ``pair_P`` int32: the pairs in key order, those left out last and given as -1; ``row_P`` int32: each pair's place in
        that order, -1 for those left out; ``counts`` [num_keys] int64: pairs per key; ``offsets`` [num_keys] int32: where each
        key's pairs end.
    """
    return _sort_pairs(key_P, num_keys, block_counts, block_pairs)
