"""Activation checkpointing that never recomputes the routing."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels.document_attention  # noqa: F401  (registers an op that is saved)
import kernels.grouped_mm_fp8  # noqa: F401  (and another)
from parallelisms.blocks import blocks
from parallelisms.routing import replay_contexts

# The models have no dropout, so there is no random state to restore.
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

aten = torch.ops.aten
SAVED_OPS = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_attention_math.default,
    torch.ops.moe_titan.document_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
MATMULS = {
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
    aten._scaled_mm.default,
    torch.ops.moe_titan.grouped_mm_fp8.default,
}


def checkpoint_blocks(model: nn.Module, every: int) -> None:
    """Checkpoints every ``every``-th block in full, in place: only its input and its tokens' experts are kept."""
    for index, block in enumerate(blocks(model).values()):
        if index % every == 0:
            block.forward = partial(_checkpoint, block.forward, context_fn=replay_contexts)


def checkpoint_selectively(model: nn.Module) -> None:
    """Checkpoints attention and feed-forward of every block, in place, by operation.

    Attention keeps its core's output and recomputes its projections, which are cheap for their size; feed-forward keeps every
    other matmul; both keep what collectives brought. The routed experts make their pre-activations again.
    """
    for block in blocks(model).values():
        moe = block.moe if getattr(block, "moe_enabled", False) else None
        feed_forward = block.feed_forward if moe is None else moe.shared_experts
        if moe is not None:
            moe.experts.recompute = True
        _checkpoint_part(block.attention, save_matmuls=False)
        if feed_forward is not None:
            _checkpoint_part(feed_forward, save_matmuls=True)


def _checkpoint_part(part: nn.Module, save_matmuls: bool) -> None:
    part.forward = partial(_checkpoint, part.forward, context_fn=partial(_save_expensive_ops, save_matmuls))


def _save_expensive_ops(save_matmuls: bool):
    matmuls = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        saved = op in SAVED_OPS
        if save_matmuls and op in MATMULS:
            matmuls[ctx.is_recompute] += 1
            saved = matmuls[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
