"""Dispatch by HybridEP (github.com/deepseek-ai/DeepEP, branch hybrid-ep), for those who installed it.

It sends a token once to each rank, over NVLink and RDMA, and puts a row for each of its experts there into the experts' order.
The host waits once a layer for the number of rows.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import TokenGradients
from parallelisms.dispatch.base import Meanwhile
from parallelisms.routing import RoutedTokens, Routing


@cache
def _open_buffer(group: ProcessGroup, D: int, max_tokens: int, num_local: int, sms: int | None) -> Any:
    """The buffer of all layers of a group."""
    return importlib.import_module("deep_ep").HybridEPBuffer(
        group,
        hidden_dim=D,
        max_num_of_tokens_per_rank=max_tokens,
        num_local_experts=num_local,
        num_sms_dispatch_api=sms,
        num_sms_combine_api=sms,
    )


class HybridEPHandle(NamedTuple):
    """``passed``: what HybridEP's dispatch gives to its combine, as it is."""

    buffer: Any
    passed: Any


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weights_TE: Tensor, chosen_TE: Tensor, buffer: Any):
        rows_RD, weights_R, _, rows_e, passed = buffer.dispatch_with_permute(
            hidden=x_TD.contiguous(), routing_map=chosen_TE, probs=weights_TE
        )
        ctx.buffer, ctx.passed = buffer, passed
        ctx.mark_non_differentiable(rows_e)
        return rows_RD, weights_R, rows_e, passed

    @staticmethod
    def backward(ctx, grad_RD: Tensor, grad_R: Tensor, *_):
        grad_TD, grad_TE = ctx.buffer.combine_with_unpermute(
            hidden=grad_RD.contiguous(), probs=grad_R.contiguous(), handle=ctx.passed
        )
        return grad_TD, grad_TE, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, handle: HybridEPHandle):
        ctx.handle, ctx.num_rows = handle, len(rows_RD)
        y_TD, _ = handle.buffer.combine_with_unpermute(hidden=rows_RD.contiguous(), handle=handle.passed)
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        grad_RD, *_ = ctx.handle.buffer.dispatch_with_permute(
            hidden=grad_TD.contiguous(), handle=ctx.handle.passed, num_permuted_tokens=ctx.num_rows
        )
        return grad_RD, None


class HybridEPDispatcher:
    """For bf16 tokens; every rank holds whole experts.

    Args:
        max_tokens: the most tokens that a rank brings.
        sms: multiprocessors of a transfer; None for its default.
    """

    def __init__(self, num_experts: int, group: ProcessGroup, max_tokens: int, sms: int | None):
        self.num_experts, self.group, self.max_tokens, self.sms = num_experts, group, max_tokens, sms

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> tuple[RoutedTokens, HybridEPHandle]:
        num_local = self.num_experts // self.group.size()
        buffer = _open_buffer(self.group, x_TD.shape[1], self.max_tokens, num_local, self.sms)
        # The last column takes what is not routed.
        experts_TK, weights_TK = routing.topk_experts_TK, routing.topk_weights_TK
        wide_TE = weights_TK.new_zeros(len(x_TD), self.num_experts + 1).scatter(1, experts_TK, weights_TK)
        chosen_TE = torch.zeros_like(wide_TE, dtype=torch.bool).scatter(1, experts_TK, True)[:, :-1].contiguous()
        rows_RD, weights_R, rows_e, passed = _Dispatch.apply(x_TD, wide_TE[:, :-1].contiguous(), chosen_TE, buffer)
        row_R = torch.arange(len(rows_RD), device=x_TD.device, dtype=torch.int32)
        offsets_e = rows_e.to(x_TD.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return RoutedTokens(rows_RD, weights_R, row_R, row_R[:, None], offsets_e), HybridEPHandle(buffer, passed)

    def even_rows(self, choices: int) -> None:
        return None

    def combine(self, rows_RD: Tensor, handle: HybridEPHandle, grads: TokenGradients | None = None) -> Tensor:
        return _Combine.apply(rows_RD, handle)
