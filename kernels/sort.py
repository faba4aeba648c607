"""Stable order of (token, choice) pairs by key, in two kernels and without a host sync.

A counting sort: every block counts its keys; then every block adds up what lies before it and places its own pairs. Integer arithmetic
throughout, so the order is the same on every run and device.
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
    key_P = tl.load(key_ptr + p_P, mask=p_P < P, other=num_keys).to(tl.int32)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), tl.histogram(key_P, BINS))


@triton.jit
def _place_kernel(
    key_ptr, block_counts_ptr, base_ptr, pair_ptr, row_ptr, counts_ptr, offsets_ptr,
    P, num_keys, num_blocks,
    BLOCK_P: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    bin_B, c_C = tl.arange(0, BINS), tl.arange(0, CHUNK)
    total_B = tl.zeros([BINS], tl.int32)
    before_B = tl.zeros([BINS], tl.int32)
    for start in range(0, num_blocks, CHUNK):
        b_C = start + c_C
        counts_CB = tl.load(block_counts_ptr + b_C[:, None] * BINS + bin_B[None, :], mask=(b_C < num_blocks)[:, None], other=0)
        total_B += tl.sum(counts_CB, axis=0)
        before_B += tl.sum(tl.where((b_C < block)[:, None], counts_CB, 0), axis=0)
    end_B = tl.cumsum(total_B, axis=0)
    if block == 0:
        tl.store(counts_ptr + bin_B, total_B.to(tl.int64), mask=bin_B < num_keys)
        tl.store(offsets_ptr + bin_B, end_B, mask=bin_B < num_keys)
    # Through memory, since a pair looks up the entry of its own key.
    tl.store(base_ptr + block * BINS + bin_B, end_B - total_B + before_B)
    tl.debug_barrier()

    first = block * BLOCK_P
    p_P = first + tl.arange(0, BLOCK_P)
    in_P = p_P < P
    key_P = tl.load(key_ptr + p_P, mask=in_P, other=num_keys).to(tl.int32)
    rank_P = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, BLOCK_P, CHUNK):
        q_C = first + start + c_C
        other_C = tl.load(key_ptr + q_C, mask=q_C < P, other=num_keys).to(tl.int32)
        earlier_PC = (key_P[:, None] == other_C[None, :]) & (q_C[None, :] < p_P[:, None])
        rank_P += tl.sum(earlier_PC.to(tl.int32), axis=1)
    place_P = tl.load(base_ptr + block * BINS + key_P) + rank_P
    left_out_P = key_P == num_keys
    tl.store(row_ptr + p_P, tl.where(left_out_P, -1, place_P), mask=in_P)
    tl.store(pair_ptr + place_P, tl.where(left_out_P, -1, p_P), mask=in_P)


def _launch_sort(key_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    P = key_P.shape[0]
    bins = triton.next_power_of_2(num_keys + 1)
    block = 1024 if P >= 1 << 17 else 256
    blocks = max(triton.cdiv(P, block), 1)
    scratch = key_P.new_empty(2, blocks, bins, dtype=torch.int32)
    pair_P, row_P = (key_P.new_empty(P, dtype=torch.int32) for _ in range(2))
    counts, offsets = key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)
    key_P = key_P.contiguous()
    _count_kernel[(blocks,)](key_P, scratch[0], P, num_keys, BLOCK_P=block, BINS=bins, num_warps=4)
    _place_kernel[(blocks,)](
        key_P, scratch[0], scratch[1], pair_P, row_P, counts, offsets, P, num_keys, blocks,
        BLOCK_P=block, BINS=bins, CHUNK=32, num_warps=8,
    )  # fmt: skip
    return pair_P, row_P, counts, offsets


@torch.library.custom_op("moe_titan::sort_pairs", mutates_args=())
def sort_pairs(key_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable order of pairs by key.

    Args:
        key_P: [P] integers in [0, num_keys]; the key ``num_keys`` means "leave out".
    Returns:
        ``pair_P`` int32: the pairs in key order, those left out last and given as -1; ``row_P`` int32: each pair's place in that order, -1
        for those left out; ``counts`` [num_keys] int64: pairs per key; ``offsets`` [num_keys] int32: where each key's pairs end.
    """
    return (_launch_sort if key_P.is_cuda else sort_pairs_reference)(key_P, num_keys)


@sort_pairs.register_fake
def _(key_P: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair_P, row_P = torch.empty_like(key_P, dtype=torch.int32), torch.empty_like(key_P, dtype=torch.int32)
    return pair_P, row_P, key_P.new_empty(num_keys, dtype=torch.int64), key_P.new_empty(num_keys, dtype=torch.int32)
