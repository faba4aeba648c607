"""Activation checkpointing that never recomputes the routing."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten.linear.default}


def checkpoint_blocks(model: nn.Module, every: int) -> None:
    """Checkpoints every ``every``-th block in full, in place: only its input and its tokens' experts are kept."""
    for index, block in enumerate(model.layers.values()):
        if index % every == 0:
            block.forward = partial(_checkpoint, block.forward, context_fn=replay_contexts)


def checkpoint_selectively(model: nn.Module) -> None:
    """Checkpoints attention and feed-forward of every block, in place, by operation.

    Attention's output, collectives and every other matmul are kept. The routed experts are left alone: they recompute their
    activation in any case.
    """
    for block in model.layers.values():
        moe = block.moe if getattr(block, "moe_enabled", False) else None
        feed_forward = block.feed_forward if moe is None else moe.shared_experts
        for part in filter(None, (block.attention, feed_forward)):
            part.forward = partial(_checkpoint, part.forward, context_fn=_save_expensive_ops)


def _save_expensive_ops():
    matmuls = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        if op in MATMULS:
            matmuls[ctx.is_recompute] += 1
            saved = matmuls[ctx.is_recompute] % 2 == 1
        else:
            saved = op in SAVED_OPS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
