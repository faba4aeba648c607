"""The Triton kernels of :mod:`kernels.document_attention`.

All rows of a batch lie one behind the other, T tokens in all. Token t attends to the tokens from ``first[t]``, where its document
begins, to itself; ``last[t]`` is where its document ends. A head's width is a power of two (``D``) and, for queries and keys, a
second one (``R``, may be 0): 192 = 128 + 64 without padding. Scores are in units of log 2.

The gradient of the scores goes through memory once, in square tiles of queries and keys (``TILE`` tokens each): query and key
gradients are then plain products, nothing is computed twice, and nothing is added up in an order that may change.
"""

import triton
import triton.language as tl


@triton.jit
def _products(a_main, a_rest, b_main, b_rest, R: tl.constexpr):
    """a @ b^T over both parts of the heads."""
    out = tl.dot(a_main, b_main.T)
    if R > 0:
        out = tl.dot(a_rest, b_rest.T, out)
    return out


@triton.jit
def _rest_of(desc, t, column, main, R: tl.constexpr):
    if R > 0:
        return desc.load([t, column])
    else:
        return main


@triton.jit
def _attend(
    out_MD, sum_M, max_M, q_MD, q_MR, k_desc, k_rest_desc, v_desc, first_M, m_M, k_column, v_column, begin, end, scale,
    MASKED: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the keys from ``begin`` to ``end`` to a running softmax."""
    for n in range(begin, end, BLOCK_N):
        k_ND = k_desc.load([n, k_column])
        scores_MN = _products(q_MD, q_MR, k_ND, _rest_of(k_rest_desc, n, k_column + D, k_ND, R), R)
        if MASKED:
            n_1N = (n + tl.arange(0, BLOCK_N))[None, :]
            scores_MN = tl.where((n_1N >= first_M[:, None]) & (n_1N <= m_M[:, None]), scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * scale)
        weights_MN = tl.exp2(scores_MN * scale - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
        v_ND = v_desc.load([n, v_column])
        out_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, out_MD * shrink_M[:, None])
        max_M = new_max_M
    return out_MD, sum_M, max_M


@triton.jit
def _attention_forward_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, lse_ptr, first_ptr,
    T, q_head, k_head, v_head, out_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries of one head."""
    # The longest rows of keys first.
    m, h = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M, tl.program_id(1)
    m_M = m + tl.arange(0, BLOCK_M)
    first_M = tl.load(first_ptr + m_M, mask=m_M < T, other=T)
    q_MD = q_desc.load([m, h * q_head])
    q_MR = _rest_of(q_rest_desc, m, h * q_head + D, q_MD, R)
    # All queries see all keys between the last document's beginning and the block itself.
    begin = tl.load(first_ptr + m) // BLOCK_N * BLOCK_N
    full = tl.minimum(tl.cdiv(tl.load(first_ptr + tl.minimum(m + BLOCK_M, T) - 1), BLOCK_N) * BLOCK_N, m)
    out_MD, sum_M = tl.zeros([BLOCK_M, DV], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    max_M = tl.full([BLOCK_M], -1e30, tl.float32)
    k_column, v_column = h // GROUP * k_head, h // GROUP * v_head
    out_MD, sum_M, max_M = _attend(
        out_MD, sum_M, max_M, q_MD, q_MR, k_desc, k_rest_desc, v_desc, first_M, m_M, k_column, v_column, begin, full, scale,
        True, D, R, BLOCK_N,
    )  # fmt: skip
    out_MD, sum_M, max_M = _attend(
        out_MD, sum_M, max_M, q_MD, q_MR, k_desc, k_rest_desc, v_desc, first_M, m_M, k_column, v_column, full, m, scale,
        False, D, R, BLOCK_N,
    )  # fmt: skip
    out_MD, sum_M, max_M = _attend(
        out_MD, sum_M, max_M, q_MD, q_MR, k_desc, k_rest_desc, v_desc, first_M, m_M, k_column, v_column, m, m + BLOCK_M, scale,
        True, D, R, BLOCK_N,
    )  # fmt: skip
    tl.store(lse_ptr + h.to(tl.int64) * T + m_M, max_M + tl.log2(sum_M), mask=m_M < T)
    out_desc.store([m, h * out_head], (out_MD / sum_M[:, None]).to(out_desc.dtype))


@triton.jit
def _attention_delta_kernel(
    out_ptr, grad_ptr, delta_ptr, T, out_token, out_head, grad_token, grad_head, DV: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Every query's sum over output times its gradient."""
    m_M, h = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    d_1D, m_M1 = tl.arange(0, DV)[None, :], m_M.to(tl.int64)[:, None]
    out_MD = tl.load(out_ptr + m_M1 * out_token + h * out_head + d_1D, mask=m_M1 < T, other=0.0).to(tl.float32)
    grad_MD = tl.load(grad_ptr + m_M1 * grad_token + h * grad_head + d_1D, mask=m_M1 < T, other=0.0).to(tl.float32)
    tl.store(delta_ptr + h.to(tl.int64) * T + m_M, tl.sum(out_MD * grad_MD, 1), mask=m_M < T)


@triton.jit
def _gather_value_grad(
    grad_v_ND, k_ND, k_NR, v_ND, q_desc, q_rest_desc, grad_desc, scores_grad_desc, lse_ptr, delta_ptr, first_ptr, slot_ptr,
    n_N, h, slot_row, begin, end, T, q_column, grad_column, scale,
    MASKED: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Goes through the queries from ``begin`` to ``end``; writes the gradient of the scores, keys by queries."""
    tile = n_N.shape[0]
    for m in range(begin, end, BLOCK_M):
        m_M = m + tl.arange(0, BLOCK_M)
        q_MD, grad_MD = q_desc.load([m, q_column]), grad_desc.load([m, grad_column])
        scores_NM = _products(k_ND, k_NR, q_MD, _rest_of(q_rest_desc, m, q_column + D, q_MD, R), R)
        lse_M = tl.load(lse_ptr + h.to(tl.int64) * T + m_M, mask=m_M < T, other=0.0)
        delta_M = tl.load(delta_ptr + h.to(tl.int64) * T + m_M, mask=m_M < T, other=0.0)
        weights_NM = tl.exp2(scores_NM * scale - lse_M[None, :])
        if MASKED:
            first_M = tl.load(first_ptr + m_M, mask=m_M < T, other=T)
            weights_NM = tl.where((n_N[:, None] >= first_M[None, :]) & (n_N[:, None] <= m_M[None, :]), weights_NM, 0.0)
        grad_v_ND = tl.dot(weights_NM.to(grad_MD.dtype), grad_MD, grad_v_ND)
        grad_weights_NM = tl.dot(v_ND, grad_MD.T)
        grad_scores_NM = (weights_NM * (grad_weights_NM - delta_M[None, :])).to(grad_MD.dtype)
        slot = tl.load(slot_ptr + m // tile)
        scores_grad_desc.store([slot_row + slot * tile, m % tile], grad_scores_NM)
    return grad_v_ND


@triton.jit
def _attention_value_grad_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, grad_desc, grad_v_desc, scores_grad_desc,
    lse_ptr, delta_ptr, first_ptr, last_ptr, slot_ptr, T, slots, head, q_head, k_head, v_head, grad_head, grad_v_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of values; the gradient of the scores of all queries that see its keys, for the two kernels below."""
    n, h_k = tl.program_id(0) * TILE, head + tl.program_id(1)
    n_N = n + tl.arange(0, TILE)
    k_ND, v_ND = k_desc.load([n, h_k * k_head]), v_desc.load([n, h_k * v_head])
    k_NR = _rest_of(k_rest_desc, n, h_k * k_head + D, k_ND, R)
    # Queries to the end of the first key's document see all keys; others may follow, to the end of the last key's.
    full = tl.maximum((tl.load(last_ptr + n) + 1) // BLOCK_M * BLOCK_M, n + TILE)
    end = tl.cdiv(tl.load(last_ptr + tl.minimum(n + TILE, T) - 1) + 1, TILE) * TILE
    full = tl.minimum(full, end)
    grad_v_ND = tl.zeros([TILE, DV], tl.float32)
    for g in range(GROUP):
        h = h_k * GROUP + g
        slot_row = ((h - head * GROUP) * slots - tl.program_id(0)) * TILE
        for phase in tl.static_range(3):
            begin = n if phase == 0 else (n + TILE if phase == 1 else full)
            until = n + TILE if phase == 0 else (full if phase == 1 else end)
            grad_v_ND = _gather_value_grad(
                grad_v_ND, k_ND, k_NR, v_ND, q_desc, q_rest_desc, grad_desc, scores_grad_desc,
                lse_ptr, delta_ptr, first_ptr, slot_ptr, n_N, h, slot_row, begin, until, T, h * q_head, h * grad_head, scale,
                phase != 1, D, R, BLOCK_M,
            )  # fmt: skip
    grad_v_desc.store([n, h_k * grad_v_head], grad_v_ND.to(grad_v_desc.dtype))


@triton.jit
def _attention_key_grad_kernel(
    q_desc, q_rest_desc, grad_k_desc, grad_k_rest_desc, scores_grad_desc, last_ptr, slot_ptr, T, slots, head, q_head, grad_head,
    scale, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of keys: the gradient of the scores times the queries."""
    n, h_k = tl.program_id(0) * TILE, head + tl.program_id(1)
    end = tl.cdiv(tl.load(last_ptr + tl.minimum(n + TILE, T) - 1) + 1, TILE) * TILE
    grad_ND = tl.zeros([TILE, D], tl.float32)
    grad_NR = tl.zeros([TILE, R if R > 0 else 16], tl.float32)
    for g in range(GROUP):
        column = (h_k * GROUP + g) * q_head
        slot_row = (((h_k - head) * GROUP + g) * slots - tl.program_id(0)) * TILE
        for m in range(n, end, STEP):
            slot = tl.load(slot_ptr + m // TILE)
            scores_grad_NM = scores_grad_desc.load([slot_row + slot * TILE, m % TILE])
            grad_ND = tl.dot(scores_grad_NM, q_desc.load([m, column]), grad_ND)
            if R > 0:
                grad_NR = tl.dot(scores_grad_NM, q_rest_desc.load([m, column + D]), grad_NR)
    grad_k_desc.store([n, h_k * grad_head], (grad_ND * scale).to(grad_k_desc.dtype))
    if R > 0:
        grad_k_rest_desc.store([n, h_k * grad_head + D], (grad_NR * scale).to(grad_k_desc.dtype))


@triton.jit
def _attention_query_grad_kernel(
    k_desc, k_rest_desc, grad_q_desc, grad_q_rest_desc, scores_grad_desc, first_ptr, slot_ptr, slots, head, k_head, grad_head,
    scale, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries: the gradient of the scores times the keys."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    m, h = block * TILE, head * GROUP + tl.program_id(1)
    column = h // GROUP * k_head
    row = (tl.program_id(1) * slots + tl.load(slot_ptr + block)) * TILE
    grad_MD = tl.zeros([TILE, D], tl.float32)
    grad_MR = tl.zeros([TILE, R if R > 0 else 16], tl.float32)
    for n in range(tl.load(first_ptr + m) // TILE * TILE, m + TILE, STEP):
        scores_grad_MN = scores_grad_desc.load([row - n // TILE * TILE + n % TILE, 0]).T
        grad_MD = tl.dot(scores_grad_MN, k_desc.load([n, column]), grad_MD)
        if R > 0:
            grad_MR = tl.dot(scores_grad_MN, k_rest_desc.load([n, column + D]), grad_MR)
    grad_q_desc.store([m, h * grad_head], (grad_MD * scale).to(grad_q_desc.dtype))
    if R > 0:
        grad_q_rest_desc.store([m, h * grad_head + D], (grad_MR * scale).to(grad_q_desc.dtype))
