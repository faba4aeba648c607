"""The experts' grouped products in low precision: by kernels, and emulated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from float8.all_gather import TiledWeight
from float8.grouped_emulation import grouped_input_grad, grouped_output, grouped_weight_grad
from float8.recipes import Recipe
from kernels.expert_mlp import HIGH_PRECISION, Kept, Operand, Products, TokenRows, Tokens, as_rows
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.packed_tokens import (
    PackedTokens,
    elements_and_scales,
    pack_tokens,
    quantize_packed_columns,
    spread_and_pack,
    spread_packed,
    unpack_tokens,
)
from kernels.quantize import quantize_columns, quantize_rows, quantize_weights, spread_rows_fp8
from kernels.swiglu_fp8 import weighted_swiglu_fp8, weighted_swiglu_fp8_backward, weighted_swiglu_rowwise_backward
from kernels.turn_rows import turn_rows


class Float8Products(Products):
    """Products of the recipes "rowwise" and "blockwise" in FP8, for tokens and weights in bf16.

    An operand is its elements and its scales; what is given in bf16 is quantised first. A weight is quantised where it is used,
    in the direction of that use, and kept only while :meth:`keeping_weights`. Rows with a scale each are quantised once for
    both products, and turned for a weight gradient; others once more in the other direction. ``packs_kept``: backward gets the
    pre-activations as the recipe quantises rows.
    """

    takes_token_grads = True

    def __init__(self, blockwise: bool, high_precision_weight_grad: bool, packs_kept: bool = False):
        self.blockwise = blockwise
        self.high_precision_weight_grad = high_precision_weight_grad
        self.packs_kept = packs_kept
        self._turns_rows = not blockwise and not high_precision_weight_grad
        self._kept: dict[tuple[torch.Size, bool], tuple[Tensor, Tensor]] | None = None

    @contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Within it weights do not change, and differ in shape: each is quantised once for each direction."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def spread(self, x_ND: Tokens, row_NK: Tensor, num_rows: int) -> tuple[Operand, Tokens]:
        if not self._turns_rows or isinstance(x_ND, PackedTokens):
            return super().spread(x_ND, row_NK, num_rows)
        elements, scale, words_NW = spread_and_pack(x_ND, row_NK, num_rows, False)
        return (elements, scale), PackedTokens(words_NW, x_ND.shape[1], False)

    def rows(self, x_ND: Tokens, row_NK: Tensor, num_rows: int) -> Operand:
        if isinstance(x_ND, PackedTokens):
            return spread_packed(x_ND.words_NW, row_NK, num_rows, x_ND.D, self.blockwise)
        return spread_rows_fp8(x_ND, row_NK, num_rows, self.blockwise)

    def swiglu(self, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Operand:
        return weighted_swiglu_fp8(gate_up_R2F, weights_P, pair_R, num_rows, self.blockwise)

    def keep(self, gate_up_R2F: Tensor, num_rows: Tensor) -> Tensor:
        return pack_tokens(gate_up_R2F.flatten(1), self.blockwise, num_rows) if self.packs_kept else gate_up_R2F

    def swiglu_backward(
        self, grad_RF: Tensor, kept: Kept, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor
    ) -> tuple[Operand, Operand, Tensor, Operand]:
        arguments = grad_RF, kept.gate_up, weights_P, pair_R, num_rows
        if self._turns_rows:
            *grad_gate_up, grad_weights_P, act_RF, scale = weighted_swiglu_rowwise_backward(*arguments, kept.first)
            return grad_gate_up, grad_gate_up, grad_weights_P, (act_RF, scale)
        grad_gate_up_R2F, elements, scale, grad_weights_P, act_RF = weighted_swiglu_fp8_backward(
            *arguments, self.blockwise, kept.first
        )
        return (elements, scale), grad_gate_up_R2F.flatten(1, 2), grad_weights_P, act_RF

    def output_grad(self, grad: Tensor | TokenRows, num_rows: Tensor) -> tuple[Operand, Operand]:
        if self._turns_rows and isinstance(grad, Tensor):
            grad = quantize_rows(grad, num_rows, False)
            return grad, grad
        operand, grad = super().output_grad(grad, num_rows)
        return operand, operand if self._turns_rows else grad

    def output(self, x_RK: Operand, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        return self._product(x_RK, w_ENK, offsets_E, transposed=False)

    def input_grad(self, grad_RN: Operand, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        return self._product(grad_RN, w_ENK, offsets_E, transposed=True)

    def _product(self, x: Operand, w_ENK: Tensor, offsets_E: Tensor, transposed: bool) -> Tensor:
        if isinstance(x, Tensor):
            x = quantize_rows(x, offsets_E[-1:], self.blockwise)
        return grouped_mm_fp8(*x, *self._weights(w_ENK, transposed), offsets_E, self.blockwise)

    def _weights(self, w_ENK: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        if isinstance(w_ENK, TiledWeight):
            return w_ENK.operand(transposed)
        if self._kept is None:
            return quantize_weights(w_ENK, self.blockwise, transposed)
        key = w_ENK.shape, transposed
        if key not in self._kept:
            self._kept[key] = quantize_weights(w_ENK, self.blockwise, transposed)
        return self._kept[key]

    def weight_grad(self, grad_RN: Operand | TokenRows, x_RK: Operand | TokenRows, offsets_E: Tensor) -> Tensor:
        if self.high_precision_weight_grad:
            grad_RN = as_rows(grad_RN)
            return HIGH_PRECISION.weight_grad(grad_RN, _unpacked_rows(x_RK, grad_RN.dtype), offsets_E)
        columns = self._turned if self._turns_rows else self._columns
        (grad_NW, grad_scale, _), x_columns = (columns(operand, offsets_E) for operand in (grad_RN, x_RK))
        return grouped_mm_fp8_weight_grad(grad_NW, grad_scale, *x_columns, self.blockwise)

    def _turned(self, x: Operand | TokenRows, offsets_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(x, Tensor):
            x = quantize_rows(x, offsets_E[-1:], False)
        if not isinstance(x, TokenRows):
            return turn_rows(*x, offsets_E)
        x_ND, pair_R, row_NK = x
        return turn_rows(*elements_and_scales(x_ND), offsets_E, pair_R, row_NK.shape[1])

    def _columns(self, x_RC: Tensor | TokenRows, offsets_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(x_RC, Tensor):
            return quantize_columns(x_RC, offsets_E, True)
        x_ND, pair_R, row_NK = x_RC
        if isinstance(x_ND, PackedTokens):
            return quantize_packed_columns(x_ND.words_NW, x_ND.D, offsets_E, pair_R, row_NK.shape[1])
        return quantize_columns(x_ND, offsets_E, True, pair_R, row_NK.shape[1])


class EmulatedProducts(Products):
    """Products that quantise every expert's rows and weight on their own, as an operand of that expert's product, on any machine.

    Waits for the offsets on the host. Rows past the last offset are never read and come out as zeros. Packed tokens are
    multiplied out in fp32, and give the same elements when they are quantised again.
    """

    def __init__(self, recipe: Recipe, high_precision_weight_grad: bool = False, packs_kept: bool = False):
        self.recipe = recipe
        self.high_precision_weight_grad = high_precision_weight_grad
        self.packs_kept = packs_kept

    def rows(self, x_ND: Tokens, row_NK: Tensor, num_rows: int) -> Tensor:
        return super().rows(_unpacked(x_ND), row_NK, num_rows)

    def keep(self, gate_up_R2F: Tensor, num_rows: Tensor) -> Tensor:
        if not self.packs_kept or not gate_up_R2F.numel():
            return gate_up_R2F
        return self.recipe.input.simulate(gate_up_R2F.flatten(1), 1).to(gate_up_R2F.dtype).view_as(gate_up_R2F)

    def output(self, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        return grouped_output(self.recipe, x_RK, w_ENK, offsets_E)

    def input_grad(self, grad_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        return grouped_input_grad(self.recipe, grad_RN, w_ENK, offsets_E)

    def weight_grad(self, grad_RN: Operand | TokenRows, x_RK: Operand | TokenRows, offsets_E: Tensor) -> Tensor:
        grad_RN, x_RK = as_rows(grad_RN), as_rows(_unpacked_rows(x_RK, torch.float32))
        if self.high_precision_weight_grad:
            return HIGH_PRECISION.weight_grad(grad_RN, x_RK.to(grad_RN.dtype), offsets_E)
        return grouped_weight_grad(self.recipe, grad_RN, x_RK, offsets_E)


def _unpacked(x_ND: Tokens) -> Tensor:
    return unpack_tokens(x_ND) if isinstance(x_ND, PackedTokens) else x_ND


def _unpacked_rows(x: Tensor | TokenRows, dtype: torch.dtype) -> Tensor | TokenRows:
    """``dtype``: of tokens that were packed."""
    packed = isinstance(x, TokenRows) and isinstance(x.x_ND, PackedTokens)
    return x._replace(x_ND=_unpacked(x.x_ND).to(dtype)) if packed else x
