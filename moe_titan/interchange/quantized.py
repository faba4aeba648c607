"""FP8 weights with a scale for each block, as DeepSeek-V3 and Qwen3 are published."""

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale_inv"


def dequantize(weight_OI: Tensor, scale_oi: Tensor, block: tuple[int, int]) -> Tensor:
    """Weights in fp32.

    Args:
        weight_OI: float8_e4m3fn.
        scale_oi: factor of each block, ceil(O / block[0]) by ceil(I / block[1]); the last blocks may be cut off.
    """
    rows, columns = weight_OI.shape
    scale_OI = scale_oi.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight_OI.to(torch.float32) * scale_OI
