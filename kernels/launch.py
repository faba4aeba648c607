"""Launches Gluon kernels: as ``kernel[grid](...)``, with less work for the host.

In every launch Triton writes down the layouts of descriptors as text and compares the constants that a kernel's module had when
it was compiled with those it has (docs/performance.md says what that takes).
"""

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_MOST = 4096
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def _kind(arg: Any) -> Any:
    """All of an argument that Triton may compile for, and more where that is less work: another number is another kind."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0, arg.get_device()
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return arg


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, options: dict[str, int], **constants: Any) -> None:
    """Launches ``kernel`` with all of its parameters in the order of its signature: ``args``, and after them ``constants``.

    ``options`` are the compiler's. The layout of a descriptor follows from its dtype and its block.
    """
    key = id(kernel), *map(_kind, args), *constants.values(), *options.values()
    if (compiled := _compiled.get(key)) is not None:
        compiled[(*grid, 1, 1)](*args, *constants.values())
        return
    compiled = kernel[grid](*args, **constants, **options)
    if len(_compiled) == _MOST:  # of operands whose sizes keep changing
        _compiled.clear()
    if isinstance(compiled, CompiledKernel):
        _compiled[key] = compiled
