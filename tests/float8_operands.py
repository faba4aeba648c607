"""Operands of a weight gradient made of bf16 rows, as the experts' products make them."""

from torch import Tensor

from kernels.quantize import quantize_columns, quantize_rows
from kernels.turn_rows import turn_rows


def of_weight_grad(x_RC: Tensor, ends_E: Tensor, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Elements, scales, and ends of the groups among them."""
    return quantize_columns(x_RC, ends_E, True) if blockwise else turn_rows(*quantize_rows(x_RC, ends_E[-1:], False), ends_E)
