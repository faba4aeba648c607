"""Registers operators with torch, as ``torch.ops.moe_titan.<name>``.

A call takes less than half of the host's time that one of an operator of ``torch.library.custom_op`` does, hundreds of times a
step (docs/performance.md). What those check in every call is missing: that no output is an input, which
``torch.library.opcheck`` finds, and that there is a formula where one is differentiated, without which torch warns, and gives
no gradient.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("moe_titan", "FRAGMENT")


def op(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable], OpOverload]:
    """Makes the decorated function, for tensors of any device, an operator whose schema is its signature.

    What it returns, ``torch.library.register_fake`` is to be told, unless that is nothing.
    """

    def register(function: Callable) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        mutated = [list(signature(function).parameters).index(arg) for arg in mutates_args]

        def call(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():  # by which a reference would be differentiated, as a kernel cannot be
                result = function(*args)
            if mutated:
                # Autograd is to notice where it has saved one of them.
                torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            return result

        # A compiler that follows Python takes an operator whole.
        _LIBRARY.impl(name, torch.compiler.disable(call), "CompositeExplicitAutograd")
        made = getattr(torch.ops.moe_titan, name).default
        if schema.endswith("-> ()"):
            torch.library.register_fake(made, lambda *_, **__: None)
        return made

    return register
