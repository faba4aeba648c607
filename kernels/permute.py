"""Moving token rows into expert order and back: two ops that are each other's adjoint.

``row_TK`` says where each of a token's K copies stands in that order. ``spread_rows`` writes a token to its rows,
``gather_sum`` adds a token's rows; the gradient of either is the other, so nothing is added by scattering, and both are
deterministic. A place of -1 names no
row: it is not written and adds nothing, which is how tokens that are not routed stay out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import op


def spread_rows_reference(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    rows_RD = x_TD.new_zeros(num_rows, x_TD.shape[1])
    token_TK = torch.arange(len(x_TD), device=x_TD.device)[:, None].expand_as(row_TK)
    rows_RD[row_TK[row_TK >= 0].long()] = x_TD[token_TK[row_TK >= 0]]
    return rows_RD


def gather_sum_reference(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    if rows_RD.shape[0] == 0:
        return rows_RD.new_zeros(row_TK.shape[0], rows_RD.shape[1])
    present_TK1 = (row_TK >= 0).unsqueeze(-1)
    picked_TKD = rows_RD[row_TK.clamp(min=0).long()]
    accumulate = torch.promote_types(rows_RD.dtype, torch.float32)
    return torch.where(present_TK1, picked_TKD.to(accumulate), 0).sum(dim=1).to(rows_RD.dtype)


@triton.jit
def _spread_rows_kernel(x_ptr, row_ptr, rows_ptr, D, stride_t, K: tl.constexpr, BLOCK_D: tl.constexpr):
    # A program reads its token once and writes all of its rows.
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        value = tl.load(x_ptr + token * stride_t + d, mask=d < D, other=0.0)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            tl.store(rows_ptr + row * D + d, value, mask=(d < D) & (row >= 0))


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


def _launch_spread_rows(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, K), D = row_TK.shape, x_TD.shape[1]
    rows_RD = x_TD.new_empty(num_rows, D)
    if x_TD.numel():
        _spread_rows_kernel[(T,)](x_TD, row_TK.contiguous(), rows_RD, D, x_TD.stride(0), K=K, BLOCK_D=_block(D), num_warps=4)
    return rows_RD


def _launch_gather_sum(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    (T, K), D = row_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(T, D)
    if y_TD.numel():
        _gather_sum_kernel[(T,)](rows_RD, row_TK.contiguous(), y_TD, D, rows_RD.stride(0), K=K, BLOCK_D=_block(D), num_warps=4)
    return y_TD


@op("spread_rows")
def spread_rows(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """Copies each token to its rows.

    Args:
        x_TD: [T, D], any floating dtype.
        row_TK: [T, K] integers in [-1, num_rows), no row twice; -1 copies nowhere.
    Returns:
        [num_rows, D] in x's dtype; rows that no token names are unspecified.
    """
    if not x_TD.is_cuda or x_TD.dtype == torch.float64:
        return spread_rows_reference(x_TD, row_TK, num_rows)
    return _launch_spread_rows(x_TD, row_TK, num_rows)


@torch.library.register_fake(spread_rows)
def _(x_TD: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@op("gather_sum")
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
    return _launch_gather_sum(rows_RD, row_TK)


@torch.library.register_fake(gather_sum)
def _(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    return rows_RD.new_empty(row_TK.shape[0], rows_RD.shape[1])


class TokenGradients:
    """Hands the gradient of sums over each token's rows [T, D] to the backward of what made the rows.

    All rows of a token have the same gradient. Autograd, whose way for it are the rows, gets zeros without memory in their place.
    """

    def __init__(self) -> None:
        self._grad_TD: Tensor | None = None

    def put(self, grad_TD: Tensor, num_rows: int) -> Tensor:
        """Returns what autograd gets."""
        self._grad_TD = grad_TD
        return grad_TD.new_zeros(()).expand(num_rows, grad_TD.shape[1])

    def take(self) -> Tensor | None:
        """None if nothing was put here since it was taken: then autograd has the rows' own gradient."""
        grad_TD, self._grad_TD = self._grad_TD, None
        return grad_TD


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, row_TK: Tensor, grads: TokenGradients | None) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.num_rows, ctx.grads = len(rows_RD), grads
        return gather_sum(rows_RD, row_TK)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        (row_TK,) = ctx.saved_tensors
        if ctx.grads is not None:
            return ctx.grads.put(grad_TD, ctx.num_rows), None, None
        return spread_rows(grad_TD, row_TK, ctx.num_rows), None, None


def unpermute(rows_RD: Tensor, row_TK: Tensor, grads: TokenGradients | None = None) -> Tensor:
    """Adds rows back into tokens: ``y[t] = sum_k rows[row_TK[t, k]]``, fp32 accumulation. See :func:`gather_sum`.

    Args:
        grads: takes, in backward, the gradient of y in place of the rows'.
    """
    return _Unpermute.apply(rows_RD, row_TK, grads)
