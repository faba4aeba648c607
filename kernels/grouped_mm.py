"""Grouped matrix products over ragged groups of rows, with device-side offsets and no padding.

Group e holds the rows from ``offsets_E[e - 1]`` (0 for the first) to ``offsets_E[e]``; any group may be empty. Rows past
the last offset belong to no group: they are never read into a product, and what they hold afterwards is unspecified.
"""

import functools

import torch
from torch import Tensor

from kernels.op import op


def grouped_mm_reference(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    out_RN = a_RK.new_zeros(a_RK.shape[0], b_EKN.shape[2])
    start = 0
    for b_KN, end in zip(b_EKN, offsets_E.tolist(), strict=True):
        torch.mm(a_RK[start:end], b_KN, out=out_RN[start:end])
        start = end
    return out_RN


def grouped_mm_weight_grad_reference(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    out_ENK = a_RK.new_empty(offsets_E.shape[0], grad_RN.shape[1], a_RK.shape[1])
    start = 0
    for out_NK, end in zip(out_ENK, offsets_E.tolist(), strict=True):
        torch.mm(grad_RN[start:end].t(), a_RK[start:end], out=out_NK)
        start = end
    return out_ENK


@functools.cache
def runs_our_kernels(device: torch.device) -> bool:
    """Whether it is a Hopper GPU, for whose tensor cores they are written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@op("grouped_mm")
def _grouped_mm(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    if not a_RK.is_cuda:
        return grouped_mm_reference(a_RK, b_EKN, offsets_E)
    if not runs_our_kernels(a_RK.device):
        return torch._grouped_mm(a_RK, b_EKN, offs=offsets_E)
    from kernels.grouped_mm_launch import launch_grouped_mm

    return launch_grouped_mm(a_RK, b_EKN, offsets_E)


@torch.library.register_fake(_grouped_mm)
def _(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_EKN.shape[2])


@op("grouped_mm_weight_grad")
def _grouped_mm_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    if not a_RK.is_cuda:
        return grouped_mm_weight_grad_reference(grad_RN, a_RK, offsets_E)
    if not runs_our_kernels(a_RK.device):
        return torch._grouped_mm(grad_RN.t(), a_RK, offs=offsets_E)
    from kernels.grouped_mm_launch import launch_weight_grad

    return launch_weight_grad(grad_RN, a_RK, offsets_E)


@torch.library.register_fake(_grouped_mm_weight_grad)
def _(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    return a_RK.new_empty(offsets_E.shape[0], grad_RN.shape[1], a_RK.shape[1])


def _has_native_kernel(a: Tensor) -> bool:
    return a.is_cuda and a.dtype == torch.bfloat16


def grouped_mm(a_RK: Tensor, b_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """``out[r] = a[r] @ b[e]`` for every row r of group e.

    Args:
        a_RK: [R, K].
        b_EKN: [E, K, N], same dtype.
        offsets_E: [E] int32, the end of each group, on the same device.
    Returns:
        [R, N]. On CUDA in bf16 one kernel without a host sync, for which K and N are multiples of 8: on Hopper ours, on other
        GPUs that of ``torch._grouped_mm``; elsewhere a loop over the groups.
    """
    if not len(a_RK):
        return a_RK.new_empty(0, b_EKN.shape[2])
    if not _has_native_kernel(a_RK):
        return grouped_mm_reference(a_RK, b_EKN, offsets_E)
    return _grouped_mm(a_RK, b_EKN, offsets_E)


def grouped_mm_weight_grad(grad_RN: Tensor, a_RK: Tensor, offsets_E: Tensor) -> Tensor:
    """``out[e] = grad[rows of e]^T @ a[rows of e]``: [E, N, K], zero for an empty group. As :func:`grouped_mm`."""
    if not len(a_RK):
        return a_RK.new_zeros(len(offsets_E), grad_RN.shape[1], a_RK.shape[1])
    if not _has_native_kernel(a_RK):
        return grouped_mm_weight_grad_reference(grad_RN, a_RK, offsets_E)
    return _grouped_mm_weight_grad(grad_RN, a_RK, offsets_E)
