"""Moving token rows into expert order and back: two ops that are each other's adjoint.

``gather_rows`` copies rows, ``gather_sum`` adds a token's rows; the gradient of either is the other, so neither direction
scatters, and both are deterministic. An index of -1 names no row: it yields zeros in ``gather_rows`` and adds nothing in
``gather_sum``, which is how rows without data stay out of the results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_rows_reference(x_TD: Tensor, token_R: Tensor) -> Tensor:
    rows_RD = x_TD.new_zeros(token_R.shape[0], x_TD.shape[1])
    present_R = token_R >= 0
    rows_RD[present_R] = x_TD[token_R[present_R]]
    return rows_RD


def gather_sum_reference(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    if rows_RD.shape[0] == 0:
        return rows_RD.new_zeros(row_TK.shape[0], rows_RD.shape[1])
    present_TK1 = (row_TK >= 0).unsqueeze(-1)
    picked_TKD = rows_RD[row_TK.clamp(min=0)]
    accumulate = torch.promote_types(rows_RD.dtype, torch.float32)
    return torch.where(present_TK1, picked_TKD.to(accumulate), 0).sum(dim=1).to(rows_RD.dtype)


@triton.jit
def _gather_rows_kernel(x_ptr, token_ptr, rows_ptr, D, stride_t, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        value = tl.load(x_ptr + token * stride_t + d, mask=(d < D) & (token >= 0), other=0.0)
        tl.store(rows_ptr + row * D + d, value, mask=d < D)


@triton.jit
def _gather_sum_kernel(rows_ptr, row_ptr, y_ptr, D, stride_r, K: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], dtype=tl.float32)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            total += tl.load(rows_ptr + row * stride_r + d, mask=(d < D) & (row >= 0), other=0.0).to(tl.float32)
        tl.store(y_ptr + token * D + d, total.to(y_ptr.dtype.element_ty), mask=d < D)


def _block(D: int) -> int:
    return min(triton.next_power_of_2(D), 2048)


def _launch_gather_rows(x_TD: Tensor, token_R: Tensor) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    R, D = token_R.shape[0], x_TD.shape[1]
    rows_RD = x_TD.new_empty(R, D)
    if rows_RD.numel():
        _gather_rows_kernel[(R,)](x_TD, token_R.contiguous(), rows_RD, D, x_TD.stride(0), BLOCK_D=_block(D), num_warps=4)
    return rows_RD


def _launch_gather_sum(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    (T, K), D = row_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    if y_TD.numel():
        _gather_sum_kernel[(T,)](rows_RD, row_TK.contiguous(), y_TD, D, rows_RD.stride(0), K=K, BLOCK_D=_block(D), num_warps=4)
    return y_TD


@torch.library.custom_op("moe_titan::gather_rows", mutates_args=())
def gather_rows(x_TD: Tensor, token_R: Tensor) -> Tensor:
    """Rows of x in the order of an index.

    Args:
        x_TD: [T, D], any floating dtype, rows contiguous.
        token_R: [R] integers in [-1, T); -1 gives a row of zeros.
    Returns:
        [R, D] in x's dtype.
    """
    if not x_TD.is_cuda or x_TD.dtype == torch.float64:
        return gather_rows_reference(x_TD, token_R)
    return _launch_gather_rows(x_TD, token_R)


@gather_rows.register_fake
def _(x_TD: Tensor, token_R: Tensor) -> Tensor:
    return x_TD.new_empty(token_R.shape[0], x_TD.shape[1])


@torch.library.custom_op("moe_titan::gather_sum", mutates_args=())
def gather_sum(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Sum of each token's rows, accumulated in fp32 (fp64 for fp64 input), in the fixed order of K.

    Args:
        rows_RD: [R, D], any floating dtype.
        row_TK: [T, K] integers in [-1, R); -1 adds nothing.
    Returns:
        [T, D] in the rows' dtype.
    """
    if not rows_RD.is_cuda or rows_RD.dtype == torch.float64:
        return gather_sum_reference(rows_RD, row_TK)
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    T, K = row_TK.shape
    D = rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    if y_TD.numel():
        _gather_sum_kernel[(T,)](rows_RD, row_TK.contiguous(), y_TD, D, rows_RD.stride(0), K=K, BLOCK_D=_block(D), num_warps=4)
    return y_TD


@gather_sum.register_fake
def _(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    return rows_RD.new_empty(row_TK.shape[0], rows_RD.shape[1])


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return gather_rows(x_TD, token_R)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        (row_TK,) = ctx.saved_tensors
        return gather_sum(grad_RD, row_TK), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return gather_sum(rows_RD, row_TK)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (token_R,) = ctx.saved_tensors
        return gather_rows(grad_TD, token_R), None, None


def permute(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Copies tokens into rows: ``rows[r] = x[token_R[r]]``. ``row_TK`` lists each token's rows (-1: none)."""
    return _Permute.apply(x_TD, token_R, row_TK)


def unpermute(rows_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Adds rows back into tokens: ``y[t] = sum_k rows[row_TK[t, k]]``, fp32 accumulation. Indices as in :func:`permute`."""
    return _Unpermute.apply(rows_RD, token_R, row_TK)
