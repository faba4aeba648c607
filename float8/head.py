"""The output projection in low precision: its logits, and the gradient of what comes in.

The weight's gradient stays as it is: it is added up over slices of the tokens in fp32, in the product, which torch's FP8 products
cannot do.
"""

from functools import cached_property

import torch
from torch import Tensor

from float8.emulation import input_grad, output
from float8.recipes import Recipe
from float8.rowwise_product import rowwise_product
from kernels.cross_entropy import HeadProducts, cross_entropy_backward_, cross_entropy_backward_fp8_
from kernels.quantize import quantize_columns, quantize_rows


class RowwiseHead(HeadProducts):
    """In FP8, with power-of-two scales for each token and each word or column of the weight."""

    @cached_property
    def _rows(self) -> Tensor:
        """How many the weight has, on the device."""
        return self.weight_VD.new_full((1,), len(self.weight_VD), dtype=torch.int32)

    @cached_property
    def _words(self) -> tuple[Tensor, Tensor]:
        return quantize_rows(self.weight_VD, self._rows, False)

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        elements_DW, scale_1D, _ = quantize_columns(self.weight_VD, self._rows, False)
        return elements_DW[:, : len(self.weight_VD)], scale_1D.flatten()

    def logits(self, h_TD: Tensor) -> Tensor:
        tokens = quantize_rows(h_TD, h_TD.new_full((1,), len(h_TD), dtype=torch.int32), False)
        return rowwise_product(*tokens, *self._words, h_TD.dtype, fast=True)

    def input_grad(
        self, logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, high_T: Tensor, grad_T: Tensor, first: int
    ) -> Tensor:
        factor_T = _factors(logits_TV, labels_T, lse_T, high_T, grad_T, first)
        elements_TV = cross_entropy_backward_fp8_(logits_TV, labels_T, lse_T, grad_T, first, factor_T)
        # A sum over the vocabulary is too long for the tensor cores' own, which keep 14 bits.
        return rowwise_product(elements_TV, 1 / factor_T, *self._columns, logits_TV.dtype, fast=False)


def _factors(logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, high_T: Tensor, grad_T: Tensor, first: int) -> Tensor:
    """The inverse of each token's scale without a look at its gradients: the largest is that of its label, since the others add
    up to it, or where the label is not among the columns that of the largest logit."""
    column_T = labels_T - first
    here_T = (column_T >= 0) & (column_T < logits_TV.shape[1])
    label_T = logits_TV.gather(1, column_T.where(here_T, 0)[:, None]).squeeze(1).float()
    largest_T = torch.where(here_T, 1 - (label_T - lse_T).exp(), (high_T - lse_T).exp()) * grad_T
    factor_T = 448 / largest_T.to(logits_TV.dtype).float().abs().clamp(min=1e-12)
    return factor_T / (2 * torch.frexp(factor_T).mantissa)


class EmulatedHead(HeadProducts):
    """Of any recipe, on any machine."""

    def __init__(self, weight_VD: Tensor, recipe: Recipe):
        super().__init__(weight_VD)
        self.recipe = recipe

    def logits(self, h_TD: Tensor) -> Tensor:
        return output(self.recipe, h_TD, self.weight_VD)

    def input_grad(
        self, logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, high_T: Tensor, grad_T: Tensor, first: int
    ) -> Tensor:
        cross_entropy_backward_(logits_TV, labels_T, lse_T, grad_T, first)
        return input_grad(self.recipe, logits_TV, self.weight_VD)
