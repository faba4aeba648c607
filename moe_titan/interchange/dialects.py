"""The names that torchtitan 0.2.2 and 0.3.0 give to the same tensors. Shapes and values are the same.

Everything here works with 0.2.2's names; a checkpoint's own are translated where it is read or written.
"""

import re
from collections.abc import Iterable

DIALECTS = ("0.2.2", "0.3.0")

_EXPERTS = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
_NEWER = [
    (r"(^|\.)output\.weight", r"\1lm_head.weight"),
    *((rf"\.moe\.experts\.{old}(\.|$)", rf".moe.routed_experts.inner_experts.{new}\1") for old, new in _EXPERTS.items()),
    (r"\.moe\.expert_bias(\.|$)", r".moe.expert_bias_E\1"),
]
_NEWER_ATTENTION = (r"\.attention\.(w[qkv])\.weight", r".attention.qkv_linear.\1.weight")
_OLDER = [
    (r"(^|\.)lm_head\.weight", r"\1output.weight"),
    *((rf"\.moe\.routed_experts\.inner_experts\.{new}(\.|$)", rf".moe.experts.{old}\1") for old, new in _EXPERTS.items()),
    (r"\.moe\.expert_bias_E(\.|$)", r".moe.expert_bias\1"),
    (r"\.attention\.qkv_linear\.(w[qkv])\.weight", r".attention.\1.weight"),
]


def to_dialect(keys: Iterable[str], dialect: str) -> dict[str, str]:
    """The name in ``dialect`` of every key, whichever dialect it is in; keys of the optimizer hold a parameter's name within."""
    older = {key: _apply(_OLDER, key) for key in keys}
    if dialect == "0.2.2":
        return older
    latent_attention = any(".attention.wkv_a." in key for key in older)
    newer = _NEWER if latent_attention else [*_NEWER, _NEWER_ATTENTION]
    return {key: _apply(newer, old) for key, old in older.items()}


def dialect_of(keys: Iterable[str]) -> str:
    keys = list(keys)
    return "0.2.2" if all(key == old for key, old in to_dialect(keys, "0.2.2").items()) else "0.3.0"


def _apply(rules: list[tuple[str, str]], key: str) -> str:
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key
