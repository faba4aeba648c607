"""Gluon kernels as they are launched, compiled for Hopper on any machine."""

import subprocess
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, mangle_type


class Recorded:
    """Stands for a kernel: keeps what it is launched with."""

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: Any, **options: Any) -> None:
            self.grid, self.arguments, self.options = grid, arguments, options

        return launch


def compiled_for_hopper(kernel: JITFunction, launched: Recorded, folder: Path) -> tuple[Any, str]:
    """The kernel, and what ptxas says of it."""
    options = dict(launched.options)
    arguments = dict(zip(kernel.arg_names, launched.arguments, strict=False))
    arguments |= {param.name: options.pop(param.name) for param in kernel.params if param.name in options}
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr or arguments[p.name] is None}
    signature = {key: "constexpr" if key in constants else mangle_type(value) for key, value in arguments.items()}
    # As for the sizes of models.
    aligned = [key for key, value in arguments.items() if isinstance(value, Tensor) or key in ("C", "K", "N", "V", "W")]
    attributes = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned if key not in constants}
    source = GluonASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", "kernel.ptx", "-o", "kernel.cubin"
    return compiled, subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
