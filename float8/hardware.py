"""Which recipes run where."""

import torch

CAPABILITY: dict[str, tuple[int, int]] = {
    "tensorwise": (9, 0),
    "rowwise": (9, 0),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Compute capability from which on tensor cores multiply a recipe's operands (9.0: Hopper, 10.0: Blackwell)."""

HOPPER = (9, 0)

KERNELS: dict[str, tuple[str, ...]] = {
    "linears": ("tensorwise", "rowwise", "blockwise"),
    "experts": ("rowwise", "blockwise"),
}
"""Recipes that there are kernels for; all others need emulation."""

HOPPER_ONLY: dict[str, tuple[str, ...]] = {"linears": ("blockwise",), "experts": KERNELS["experts"]}
"""Those whose kernels are for compute capability 9.0 alone."""

TILE = 16
"""What the number of tokens must be a multiple of for torchao's linear layers, which sum over it in the weight gradient."""


def capability() -> tuple[int, int] | None:
    """Of this machine's GPU, None for no GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def runnable(part: str, capability: tuple[int, int] | None) -> list[str]:
    """Recipes that run without emulation for "linears" or "experts" on a GPU of the given capability, None for no GPU."""
    elsewhere = () if capability == HOPPER else HOPPER_ONLY[part]
    return [recipe for recipe in KERNELS[part] if supports(recipe, capability) and recipe not in elsewhere]


def supports(recipe: str, capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability >= CAPABILITY[recipe]
