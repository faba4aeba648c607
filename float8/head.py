"""The output projection in low precision.

Of the weight's gradient, which is added up over slices of the tokens in fp32, only ``rowwise`` has operands in FP8: see
:mod:`kernels.cross_entropy_fp8` for those of the logits' gradient.
"""

from functools import cached_property

import torch
from torch import Tensor

from float8.emulation import input_grad, output
from float8.recipes import Recipe, turned_rows
from float8.rowwise_product import rowwise_product
from kernels.cross_entropy import HeadProducts, LogitsSlice, add_product, cross_entropy_backward_
from kernels.cross_entropy_fp8 import cross_entropy_backward_fp8
from kernels.grouped_mm_fp8 import mm_fp8_weight_grad, mm_fp8_weight_grad_
from kernels.quantize import BLOCK, quantize_rows, quantize_weights
from kernels.turn_rows import turn_rows


class RowwiseHead(HeadProducts):
    """In FP8, with power-of-two scales for each token and each word or column of the weight; for its gradient of each 128 tokens,
    and one for all of the logits' gradient."""

    @cached_property
    def _words(self) -> tuple[Tensor, Tensor]:
        return quantize_rows(self.weight_VD, None, False)

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        elements_1DV, scale_1D = quantize_weights(self.weight_VD[None], False, True)
        return elements_1DV[0], scale_1D[0]

    def logits(self, h_TD: Tensor) -> Tensor:
        return rowwise_product(*quantize_rows(h_TD, None, False), *self._words, h_TD.dtype, fast=True)

    def grads(self, h_TD: Tensor, part: LogitsSlice, sum_VD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits_TV, labels_T, lse_T, _, grad_T, first = part
        factor_T, turned_factor = _factors(part), _turned_factor(grad_T)
        rows_TV, turned_VW = cross_entropy_backward_fp8(logits_TV, labels_T, lse_T, grad_T, first, factor_T, turned_factor)
        # A sum over the vocabulary is too long for the tensor cores' own, which keep 14 bits.
        grad_h_TD = rowwise_product(rows_TV, 1 / factor_T, *self._columns, logits_TV.dtype, fast=False)
        h_DW, h_scale, _ = turn_rows(*quantize_rows(h_TD, None, False), None)
        operands = turned_VW, (1 / turned_factor).repeat(turned_VW.shape[1] // BLOCK), h_DW[:, : turned_VW.shape[1]], h_scale
        if dtype != torch.float32:
            return grad_h_TD, mm_fp8_weight_grad(*operands, len(h_TD), False)
        adds = sum_VD is not None
        sum_VD = sum_VD if adds else self.weight_VD.new_empty(self.weight_VD.shape, dtype=dtype)
        mm_fp8_weight_grad_(sum_VD, *operands, len(h_TD), adds)
        return grad_h_TD, sum_VD


def _turned_factor(grad_T: Tensor) -> Tensor:
    """The inverse of the scale [1] of all gradients of logits in E5M2, of which none is larger than that of its token's loss."""
    return _floor_power_of_two(57344 / grad_T.abs().amax(0, keepdim=True).clamp(min=1e-30))


def _factors(part: LogitsSlice) -> Tensor:
    """The inverse of each token's scale without a look at its gradients: the largest is that of its label, since the others add
    up to it, or where the label is not among the columns that of the largest logit. Of a token that is sure of its label or of
    a word elsewhere, fp32 does not know it: from 2^-16 of the loss's gradient down the scale stays, at no cost to the rest."""
    logits_TV, labels_T, lse_T, high_T, grad_T, first = part
    column_T = labels_T - first
    here_T = (column_T >= 0) & (column_T < logits_TV.shape[1])
    label_T = logits_TV.gather(1, column_T.where(here_T, 0)[:, None]).squeeze(1).float()
    largest_T = torch.where(here_T, 1 - (label_T - lse_T).exp(), (high_T - lse_T).exp()).clamp(min=2**-16) * grad_T
    return _floor_power_of_two(448 / largest_T.to(logits_TV.dtype).float().abs().clamp(min=1e-12))


def _floor_power_of_two(x: Tensor) -> Tensor:
    return x / (2 * torch.frexp(x).mantissa)


class EmulatedHead(HeadProducts):
    """Of any recipe, on any machine."""

    def __init__(self, weight_VD: Tensor, recipe: Recipe):
        super().__init__(weight_VD)
        self.recipe = recipe

    def logits(self, h_TD: Tensor) -> Tensor:
        return output(self.recipe, h_TD, self.weight_VD)

    def grads(self, h_TD: Tensor, part: LogitsSlice, sum_VD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits_TV = part.logits_TV
        cross_entropy_backward_(logits_TV, part.labels_T, part.lse_T, part.grad_T, part.first)
        grad_h_TD = input_grad(self.recipe, logits_TV, self.weight_VD)
        if not self.recipe.turns_rows:
            return grad_h_TD, add_product(sum_VD, logits_TV.t(), h_TD, dtype)
        factor = _turned_factor(part.grad_T)
        grad_TV = (logits_TV.float() * factor).clamp(-57344, 57344).to(torch.float8_e5m2).float() / factor
        grad_VD = (grad_TV.t() @ turned_rows(self.recipe.input, h_TD)).to(dtype)
        return grad_h_TD, grad_VD if sum_VD is None else sum_VD.add_(grad_VD)
