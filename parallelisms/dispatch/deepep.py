"""Dispatch by the training kernels of DeepEP (github.com/deepseek-ai/DeepEP, package ``deep_ep``), for those who installed it.

It sends a token once to each rank, as nvlink does, also between hosts over RDMA. The host waits once a layer for what arrives.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.permute import TokenGradients, unpermute
from kernels.sort import sort_pairs
from parallelisms.dispatch.base import Meanwhile
from parallelisms.routing import RoutedTokens, Routing


@cache
def _open_buffer(group: ProcessGroup, token_bytes: int, sms: int | None) -> Any:
    """The buffer of all layers of a group, of the size that DeepEP recommends."""
    Buffer = importlib.import_module("deep_ep").Buffer
    if sms is not None:
        Buffer.set_num_sms(sms)
    configs = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(token_bytes, group.size()) for config in configs)
    rdma_bytes = max(config.get_rdma_buffer_size_hint(token_bytes, group.size()) for config in configs)
    return Buffer(group, nvlink_bytes, rdma_bytes)


class DeepEPHandle(NamedTuple):
    """``passed``: what DeepEP's dispatch gives to its combine, as it is."""

    buffer: Any
    passed: Any
    row_NK: Tensor


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int, buffer: Any):
        chosen_TK = torch.where(experts_TK < num_experts, experts_TK, -1)
        tokens_per_rank, tokens_per_rdma_rank, tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
            chosen_TK, num_experts
        )
        tokens_ND, local_NK, weights_NK, rows_e, passed, _ = buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=chosen_TK,
            topk_weights=weights_TK.contiguous(),
            num_tokens_per_rank=tokens_per_rank,
            num_tokens_per_rdma_rank=tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=tokens_per_expert,
        )
        ctx.buffer, ctx.passed = buffer, passed
        ctx.mark_non_differentiable(local_NK)
        return tokens_ND, weights_NK, local_NK, sum(rows_e), passed

    @staticmethod
    def backward(ctx, grad_ND: Tensor, grad_NK: Tensor, *_):
        grad_TD, grad_TK, _ = ctx.buffer.combine(grad_ND.contiguous(), ctx.passed, topk_weights=grad_NK.contiguous())
        return grad_TD, grad_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums_ND: Tensor, handle: DeepEPHandle):
        ctx.handle = handle
        y_TD, _, _ = handle.buffer.combine(sums_ND, handle.passed)
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        grad_ND, *_ = ctx.handle.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle.passed)
        return grad_ND, None


class DeepEPDispatcher:
    """For bf16 tokens; every rank holds whole experts.

    Args:
        sms: multiprocessors of a transfer, an even number; None for its default.
    """

    def __init__(self, num_experts: int, group: ProcessGroup, sms: int | None):
        self.num_experts, self.group, self.sms = num_experts, group, sms

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> tuple[RoutedTokens, DeepEPHandle]:
        buffer = _open_buffer(self.group, x_TD.shape[1] * x_TD.element_size(), self.sms)
        tokens_ND, weights_NK, local_NK, num_rows, passed = _Dispatch.apply(
            x_TD, routing.topk_weights_TK, routing.topk_experts_TK, self.num_experts, buffer
        )
        num_local = self.num_experts // self.group.size()
        key_NK = torch.where(local_NK >= 0, local_NK, num_local)
        pair_P, row_P, _, offsets_e = sort_pairs(key_NK.flatten(), num_local)
        routed = RoutedTokens(tokens_ND, weights_NK.flatten(), pair_P[:num_rows], row_P.view_as(key_NK), offsets_e)
        return routed, DeepEPHandle(buffer, passed, routed.row_NK)

    def even_rows(self, choices: int) -> None:
        return None

    def combine(self, rows_RD: Tensor, handle: DeepEPHandle, grads: TokenGradients | None = None) -> Tensor:
        return _Combine.apply(unpermute(rows_RD, handle.row_NK, grads), handle)
