"""Regional compilation: one compiled forward per block, with the routed experts outside of it."""

import torch
from torch import nn

from parallelisms.blocks import blocks


def apply_compile(model: nn.Module, backend: str) -> None:
    """Compiles every block's forward in place, and shared experts apart.

    A MoE layer's routed part runs between two compiled regions (its number of rows is data), so token counts never enter a
    compiled graph and cannot cause a recompilation.
    """
    # Blocks share one code object and differ by the tensors that they close over.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 4 * len(blocks(model)))
    for block in blocks(model).values():
        block.forward = torch.compile(block.forward, backend=backend)
        shared = block.moe.shared_experts if getattr(block, "moe_enabled", False) else None
        if shared is not None:
            shared.forward = torch.compile(shared.forward, backend=backend)
