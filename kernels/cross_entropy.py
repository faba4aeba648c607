"""Output projection and cross-entropy in one, a slice of the tokens at a time.

The logits of all tokens never exist, and no fp32 copy of any: a slice's logits are read once for the loss and then replaced by
their gradient, from which the gradients of the projection follow at once. Backward only scales them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.op import op


def partial_cross_entropy_reference(logits_TV: Tensor, labels_T: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    max_T = wide_TV.amax(1)
    sum_T = (wide_TV - max_T[:, None]).exp().sum(1)
    here_T, column_T = _local_column(labels_T, first, logits_TV.shape[1])
    target_T = torch.where(here_T, wide_TV.gather(1, column_T[:, None]).squeeze(1), 0)
    return max_T, sum_T, target_T


def cross_entropy_backward_reference(logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int) -> Tensor:
    probs_TV = (logits_TV.to(lse_T.dtype) - lse_T[:, None]).exp()
    here_T, column_T = _local_column(labels_T, first, logits_TV.shape[1])
    probs_TV.scatter_add_(1, column_T[:, None], -here_T[:, None].to(probs_TV.dtype))
    return (probs_TV * grad_T[:, None]).to(logits_TV.dtype)


def _local_column(labels_T: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    local_T = labels_T - first
    here_T = (local_T >= 0) & (local_T < width)
    return here_T, torch.where(here_T, local_T, 0)


@triton.jit
def _partial_kernel(logits_ptr, labels_ptr, max_ptr, sum_ptr, target_ptr, V, stride_t, first, BLOCK_V: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + t * stride_t
    v_V = tl.arange(0, BLOCK_V)
    high_V = tl.full([BLOCK_V], -float("inf"), tl.float32)
    sum_V = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        logit_V = tl.load(row_ptr + start + v_V, mask=start + v_V < V, other=-float("inf")).to(tl.float32)
        new_V = tl.maximum(high_V, logit_V)
        # Lanes that have seen nothing yet hold -inf; their difference would be NaN.
        seen_V = tl.where(new_V == -float("inf"), 0.0, new_V)
        sum_V = sum_V * tl.exp(high_V - seen_V) + tl.exp(logit_V - seen_V)
        high_V = new_V
    high = tl.max(high_V, axis=0)
    tl.store(max_ptr + t, high)
    tl.store(sum_ptr + t, tl.sum(sum_V * tl.exp(high_V - high), axis=0))
    column = tl.load(labels_ptr + t) - first
    here = (column >= 0) & (column < V)
    tl.store(target_ptr + t, tl.load(row_ptr + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _backward_kernel(logits_ptr, labels_ptr, lse_ptr, grad_ptr, V, stride_t, first, BLOCK_V: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    v_V = start + tl.arange(0, BLOCK_V)
    ptr_V = logits_ptr + t * stride_t + v_V
    logit_V = tl.load(ptr_V, mask=v_V < V, other=-float("inf")).to(tl.float32)
    prob_V = tl.exp(logit_V - tl.load(lse_ptr + t))
    column = tl.load(labels_ptr + t) - first
    grad_V = tl.where(v_V == column, prob_V - 1.0, prob_V) * tl.load(grad_ptr + t)
    tl.store(ptr_V, grad_V, mask=v_V < V)


@op("partial_cross_entropy")
def partial_cross_entropy(logits_TV: Tensor, labels_T: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's share of softmax cross-entropy over a vocabulary of which it holds the columns from ``first`` on.

    Args:
        logits_TV: [T, V], any floating dtype, rows contiguous.
        labels_T: [T] int64 in the whole vocabulary; any other value (such as -100) names no column.
    Returns:
        fp32 [T] each: the largest logit, the sum of exp(logit - largest), and the label's logit or 0 where it is not here.
    """
    if not logits_TV.is_cuda or logits_TV.dtype == torch.float64:
        return partial_cross_entropy_reference(logits_TV, labels_T, first)
    return _launch_partial(logits_TV, labels_T, first)


def _launch_partial(logits_TV: Tensor, labels_T: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    T, V = logits_TV.shape
    max_T, sum_T, target_T = (logits_TV.new_empty(T, dtype=torch.float32) for _ in range(3))
    if T:
        _partial_kernel[(T,)](
            logits_TV, labels_T, max_T, sum_T, target_T, V, logits_TV.stride(0), first, BLOCK_V=_block(V), num_warps=8
        )
    return max_T, sum_T, target_T


@torch.library.register_fake(partial_cross_entropy)
def _(logits_TV: Tensor, labels_T: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    max_T, sum_T, target_T = (logits_TV.new_empty(logits_TV.shape[0], dtype=wide) for _ in range(3))
    return max_T, sum_T, target_T


@op("cross_entropy_backward_", mutates_args=("logits_TV",))
def cross_entropy_backward_(logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int) -> None:
    """Replaces logits by ``(softmax - onehot(label)) * grad``. ``lse_T``: log-sum-exp over the whole vocabulary."""
    if not logits_TV.is_cuda or logits_TV.dtype == torch.float64:
        logits_TV.copy_(cross_entropy_backward_reference(logits_TV, labels_T, lse_T, grad_T, first))
    else:
        _launch_backward(logits_TV, labels_T, lse_T, grad_T, first)


def _launch_backward(logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int) -> None:
    T, V = logits_TV.shape
    if T:
        block = _block(V)
        _backward_kernel[(T, triton.cdiv(V, block))](
            logits_TV, labels_T, lse_T, grad_T, V, logits_TV.stride(0), first, BLOCK_V=block, num_warps=8
        )


def _block(V: int) -> int:
    return min(triton.next_power_of_2(V), 4096)


class LogitsSlice(NamedTuple):
    """Logits [T, V], labels [T], and fp32 [T] each: log-sum-exp over the whole vocabulary, the largest of these logits, what the
    loss's gradient is multiplied by. ``first`` is the first column's word."""

    logits_TV: Tensor
    labels_T: Tensor
    lse_T: Tensor
    high_T: Tensor
    grad_T: Tensor
    first: int


class HeadProducts:
    """The three products of the projection, of which low-precision recipes have their own.

    Made for one call, within which the weight does not change.
    """

    def __init__(self, weight_VD: Tensor):
        self.weight_VD = weight_VD

    def logits(self, h_TD: Tensor) -> Tensor:
        return h_TD @ self.weight_VD.t()

    def grads(self, h_TD: Tensor, part: LogitsSlice, sum_VD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The gradient of h [T, D], and that of the weight in ``dtype``, in the sum's place added to it; logits are lost."""
        logits_TV = part.logits_TV
        cross_entropy_backward_(logits_TV, part.labels_T, part.lse_T, part.grad_T, part.first)
        return logits_TV @ self.weight_VD, add_product(sum_VD, logits_TV.t(), h_TD, dtype)


# Logits that exist at a time.
_SLICE = 1 << 29


class _LinearCrossEntropySums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, weight_VD, labels_T, ignored: int, scales, group: ProcessGroup | None, products, differentiate: bool):
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        first = 0 if group is None else group.rank() * len(weight_VD)
        slices = max(-(-len(labels_T) // len(scales) * len(weight_VD) // _SLICE), 1)
        losses, grad_h_parts = [], []
        products = (products if len(labels_T) else HeadProducts)(weight_VD)  # of no tokens there is nothing to quantise
        # Several slices add up in fp32; a single one needs no sum.
        dtype, grad_weight_VD = weight_VD.dtype if slices * len(scales) == 1 else wide, None
        for scale, part_TD, part_T in zip(scales, h_TD.chunk(len(scales)), labels_T.chunk(len(scales)), strict=True):
            loss = h_TD.new_zeros((), dtype=wide)
            for h_tD, labels_t in zip(part_TD.chunk(slices), part_T.chunk(slices), strict=True):
                logits_tV = products.logits(h_tD)
                high_t, *sums = partial_cross_entropy(logits_tV, labels_t, first)
                lse_t, target_t = _reduced(high_t, *sums, group)
                trained_t = labels_t != ignored
                loss += torch.where(trained_t, lse_t - target_t, 0).sum()
                if differentiate:
                    grad_t = trained_t.to(wide) * scale
                    part = LogitsSlice(logits_tV, labels_t, lse_t, high_t, grad_t, first)
                    grad_h_tD, grad_weight_VD = products.grads(h_tD, part, grad_weight_VD, dtype)
                    grad_h_parts.append(grad_h_tD)
            losses.append(loss)
        if differentiate:
            ctx.save_for_backward(torch.cat(grad_h_parts), grad_weight_VD)
            ctx.dtype = weight_VD.dtype
        sums_N = torch.stack(losses)
        ctx.mark_non_differentiable(sums_N)
        return sum(scale * loss for scale, loss in zip(scales, losses, strict=True)), sums_N

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        grad_h_TD, sum_VD = ctx.saved_tensors
        # In one pass, rounded once.
        grad_weight_VD = torch.mul(sum_VD, grad, out=torch.empty_like(sum_VD, dtype=ctx.dtype))
        return grad_h_TD * grad, grad_weight_VD, *[None] * 6


def add_product(sum_VD: Tensor | None, a_VT: Tensor, b_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """``sum + a @ b`` in the sum's place, or the product alone; on a GPU in the product's own epilogue, unrounded."""
    if a_VT.is_cuda and dtype != a_VT.dtype:
        if sum_VD is None:
            return torch.mm(a_VT, b_TD, out_dtype=dtype)
        return torch.addmm(sum_VD, a_VT, b_TD, out_dtype=dtype, out=sum_VD)
    product_VD = (a_VT @ b_TD).to(dtype)
    return product_VD if sum_VD is None else sum_VD.add_(product_VD)


def _reduced(max_T: Tensor, sum_T: Tensor, target_T: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and label's logit over the whole vocabulary, from each rank's share."""
    if group is not None:
        local_max_T, max_T = max_T, max_T.clone()
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=group)
        both_2T = torch.stack((sum_T * (local_max_T - max_T).exp(), target_T))
        dist.all_reduce(both_2T, group=group)
        sum_T, target_T = both_2T.unbind()
    return max_T + sum_T.log(), target_T


def linear_cross_entropy_sums(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    ignored: int,
    scales: tuple[float, ...],
    group: ProcessGroup | None = None,
    products: Callable[[Tensor], HeadProducts] = HeadProducts,
) -> tuple[Tensor, Tensor]:
    """Sums over trained tokens of the negative log-likelihood of ``h @ weight^T``, in fp32 (fp64 for fp64 input), of each of N
    equally long parts of the T tokens, one behind the other. All parts share one gradient of the weight.

    Args:
        h_TD, weight_VD: same floating dtype; with ``group``, this rank's equal share of the vocabulary's rows, in rank order, and
            then the gradient of h is this rank's share of a sum.
        labels_T: [T] int64 in the whole vocabulary, ``ignored`` where not trained.
        scales: what the sum of each of the N parts counts for.
        group: ranks among which the vocabulary is cut; each returns the whole sums. None: not cut.
        products: makes those of the weight.
    Returns:
        The scaled sums' sum, and, without gradient, the [N] sums themselves.
    """
    arguments = h_TD, weight_VD, labels_T, ignored, scales, group, products
    return _LinearCrossEntropySums.apply(*arguments, torch.is_grad_enabled())
