"""The product of two FP8 matrices whose rows have a scale each."""

import torch
from torch import Tensor


def rowwise_product(a_MK: Tensor, a_scale_M: Tensor, b_NK: Tensor, b_scale_N: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """``(a * a_scale) @ (b * b_scale)^T``, [M, N] in ``dtype``.

    Args:
        a_MK, b_NK: E4M3, the numbers of a row side by side; N and K are multiples of 16.
        a_scale_M, b_scale_N: fp32.
        fast: the tensor cores may keep 14 bits of a sum, which a long one needs more of.
    """
    if not a_MK.is_cuda:
        return ((a_MK.float() * a_scale_M[:, None]) @ (b_NK.float() * b_scale_N[:, None]).t()).to(dtype)
    scales = {"scale_a": a_scale_M[:, None], "scale_b": b_scale_N[None]}
    return torch._scaled_mm(a_MK, b_NK.t(), **scales, out_dtype=dtype, use_fast_accum=fast)
