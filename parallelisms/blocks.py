"""Which parts of a model are transformer blocks, to be split, recomputed, compiled and sharded each by itself."""

from torch import nn


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By name: the layers, then those that predict further tokens (see :mod:`moe_titan.layers.prediction`)."""
    holders = {name: getattr(model, name, None) for name in ("layers", "mtp_layers")}
    return {f"{name}.{key}": block for name, holder in holders.items() if holder for key, block in holder.named_children()}
