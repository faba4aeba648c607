"""Launches the kernels of :mod:`kernels.grouped_mm` and :mod:`kernels.grouped_mm_fp8`, as many programs as multiprocessors.

Apart from them, because it takes Gluon to import this, an experimental part of Triton that is needed nowhere else.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.grouped_mm_fp8_kernels import _grouped_mm_blockwise_kernel, _weight_grad_fp8_kernel
from kernels.grouped_mm_kernels import _grouped_mm_kernel, _weight_grad_kernel
from kernels.launch import launch
from kernels.programs import multiprocessors
from kernels.quantize import BLOCK, E4M3
from kernels.streams import for_any_stream

_ELEMENTS = {
    E4M3: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}
_ROW_BYTES = 128  # of a block in shared memory, along what is summed over
_OPTIONS = {"num_warps": 4, "maxnreg": 168}  # see kernels/ring_kernels.py


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([*block], _ELEMENTS[dtype])


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [*block], _layout(block, x.dtype))


def _aligned(x: Tensor) -> Tensor:
    """As descriptors want it, else a copy: rows of numbers side by side, all of which begin at multiples of 16 bytes."""
    *others, last = x.stride()
    fits = last == 1 and not any(stride * x.itemsize % 16 for stride in others) and x.data_ptr() % 16 == 0
    return x if fits else x.new_empty(x.shape).copy_(x)


def _check(offsets_E: Tensor, groups: int, sizes: dict[str, int], multiple: int, same: tuple[int, int]) -> None:
    """What a kernel would read or write out of bounds by, of given ``sizes``; ``same`` are those that both operands have.

    Raises:
        ValueError: it is wrong.
    """
    if offsets_E.dtype != torch.int32 or tuple(offsets_E.shape) != (groups,):
        raise ValueError(
            f"ends of {groups} groups must be int32 [{groups}], not {offsets_E.dtype} {[*offsets_E.shape]}; convert or pass those"
        )
    if same[0] != same[1]:
        raise ValueError(f"operands must have the same size where they meet, not {same[0]} and {same[1]}")
    if wrong := {name: size for name, size in sizes.items() if size % multiple}:
        raise ValueError(f"sizes must be multiples of {multiple}, not {wrong}; pad the weights")


@functools.cache
def _counters(device: torch.device) -> Iterator[Tensor]:
    """Counters of tiles, zero between launches, to be used in turn: launches that run at the same time need one each."""
    counters = torch.zeros(1024, 4, dtype=torch.int32, device=device)  # 16 bytes apart: Triton compiles for aligned addresses
    return itertools.cycle(for_any_stream(counters).unbind())


def _counter(device: torch.device) -> Tensor:
    """A launch's own in a graph, which may be replayed at any time and sets it to zero first."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    return next(_counters(device))


def _grid(device: torch.device) -> tuple[int]:
    return (multiprocessors(device),)


def launch_grouped_mm(
    a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor, a_scale_R: Tensor | None = None, b_scale_EN: Tensor | None = None
) -> Tensor:
    """Of bf16, or of E4M3 with scales and the numbers along K side by side."""
    (R, K), (E, depth_of_b, N), depth = a_RK.shape, b_EKN.shape, _ROW_BYTES // a_RK.itemsize
    _check(offsets_E, E, {"K": K, "N": N}, 16 // a_RK.itemsize, (K, depth_of_b))
    a_RK, out_RN, stored_enk = _aligned(a_RK), a_RK.new_empty(R, N, dtype=torch.bfloat16), b_EKN.stride(1) == 1
    b = _descriptor(_aligned(b_EKN.transpose(1, 2)), 1, 256, depth) if stored_enk else _descriptor(_aligned(b_EKN), 1, depth, 256)
    pairs = out_RN.view(torch.int32)
    launch(
        _grouped_mm_kernel, _grid(a_RK.device),
        _descriptor(a_RK, 64, depth), b, _descriptor(pairs, 64, 32), a_scale_R, b_scale_EN, pairs,
        _counter(a_RK.device), offsets_E, E, K, N, options=_OPTIONS, B_IS_ENK=stored_enk,
    )  # fmt: skip
    return out_RN


def launch_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    N, K, E = grad_RN.shape[1], a_RK.shape[1], len(offsets_E)
    _check(offsets_E, E, {"K": K, "N": N}, 8, (len(grad_RN), len(a_RK)))
    grad_RN, a_RK = _aligned(grad_RN), _aligned(a_RK)
    out_ENK = a_RK.new_empty(E, N, K)
    pairs = out_ENK.flatten(0, 1).view(torch.int32)
    launch(
        _weight_grad_kernel, _grid(a_RK.device),
        _descriptor(grad_RN, 64, 64), _descriptor(a_RK, 64, 256), _descriptor(pairs, 64, 32),
        pairs, _counter(a_RK.device), offsets_E, E, N, K, options=_OPTIONS,
    )  # fmt: skip
    return out_ENK


def launch_grouped_mm_blockwise(a_RK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor) -> Tensor:
    (R, K), (E, N, depth_of_b) = a_RK.shape, b_ENK.shape
    _check(offsets_E, E, {"K": K, "N": N}, BLOCK, (K, depth_of_b))
    a_RK, b_ENK, out_RN = _aligned(a_RK), _aligned(b_ENK), a_RK.new_empty(R, N, dtype=torch.bfloat16)
    launch(
        _grouped_mm_blockwise_kernel, _grid(a_RK.device),
        _descriptor(a_RK, BLOCK, BLOCK), _descriptor(b_ENK.flatten(0, 1), BLOCK, BLOCK), _descriptor(out_RN, 64, 64),
        a_scale, b_scale, out_RN, _counter(a_RK.device), offsets_E, E, K, N, R, options=_OPTIONS,
    )  # fmt: skip
    return out_RN


def launch_weight_grad_fp8(
    grad_NW: Tensor, grad_scale: Tensor, a_KW: Tensor, a_scale: Tensor, ends_E: Tensor, blockwise: bool,
    wide_ENK: Tensor | None = None, adds: bool = False,
) -> Tensor:  # fmt: skip
    """In bf16, or in what is given in fp32, to which it may be added."""
    N, K, E = len(grad_NW), len(a_KW), len(ends_E)
    _check(ends_E, E, {"K": K, "N": N}, BLOCK if blockwise else 16, (grad_NW.shape[1], a_KW.shape[1]))
    if wide_ENK is not None and not (
        wide_ENK.shape == (E, N, K) and wide_ENK.dtype == torch.float32 and wide_ENK.is_contiguous()
    ):
        raise ValueError(f"the sum must be contiguous fp32 {(E, N, K)}, not {wide_ENK.dtype} {tuple(wide_ENK.shape)}; copy it")
    out_ENK = a_KW.new_empty(E, N, K, dtype=torch.bfloat16) if wide_ENK is None else wide_ENK
    out_desc = _descriptor(out_ENK.flatten(0, 1), 64, 64) if wide_ENK is None else None
    scales = (_descriptor(x, 1, BLOCK) if blockwise else x for x in (grad_scale, a_scale))
    launch(
        _weight_grad_fp8_kernel, _grid(a_KW.device),
        _descriptor(grad_NW, BLOCK, BLOCK), _descriptor(a_KW, BLOCK, BLOCK), *scales, out_desc,
        out_ENK, _counter(a_KW.device), ends_E, E, N, K, options=_OPTIONS, BLOCKWISE=blockwise, ADDS=adds,
    )  # fmt: skip
    return out_ENK
