"""The gradient of cross-entropy's logits as FP8 operands of both products that take it.

A sum over tokens must not lose the probability of a word that none of them has for its label: most words are such, and their rows
of the projection's weight have no other gradient. E5M2 reaches down to 2^-31 of its largest number, E4M3, with one bit more,
only to 2^-17: enough for a sum over the words, of which the likely ones make up the most.
"""

import torch
import triton
from torch import Tensor

from kernels.cross_entropy import cross_entropy_backward_reference
from kernels.op import op
from kernels.quantize import BLOCK, E4M3

E5M2 = torch.float8_e5m2


def _empty(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    T, V = logits_TV.shape
    return logits_TV.new_empty(T, V, dtype=E4M3), logits_TV.new_empty(V, triton.cdiv(T, BLOCK) * BLOCK, dtype=E5M2)


def launch_gradients(
    logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int, factor_T: Tensor, turned_factor: Tensor
) -> tuple[Tensor, Tensor]:
    from kernels.cross_entropy_fp8_kernels import COLUMNS, WARPS, _gradients_kernel
    from kernels.launch import launch  # takes Gluon, as the kernel does

    (T, V), (rows_TV, turned_VW) = logits_TV.shape, _empty(logits_TV)
    if T:
        launch(
            _gradients_kernel, (triton.cdiv(T, BLOCK), triton.cdiv(V, COLUMNS.value)), logits_TV, labels_T, lse_T, grad_T,
            factor_T, turned_factor, rows_TV, turned_VW, T, V, turned_VW.shape[1], logits_TV.stride(0), first,
            options={"num_warps": WARPS.value, "maxnreg": 128},
        )  # fmt: skip
    return rows_TV, turned_VW


@op("cross_entropy_backward_fp8")
def cross_entropy_backward_fp8(
    logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int, factor_T: Tensor, turned_factor: Tensor
) -> tuple[Tensor, Tensor]:
    """What :func:`kernels.cross_entropy.cross_entropy_backward_` replaces logits by, rounded to their type, as two operands.

    Args:
        factor_T: [T] fp32, what the elements of each token are multiplied by for a product over the vocabulary.
        turned_factor: [1] fp32, the same of all for a product over the tokens.
    Returns:
        E4M3 [T, V], larger numbers as the largest; and E5M2 [V, T] with zeros up to a multiple of 128 tokens.
    """
    if logits_TV.is_cuda:
        return launch_gradients(logits_TV, labels_T, lse_T, grad_T, first, factor_T, turned_factor)
    rows_TV, turned_VW = _empty(logits_TV)
    grad_TV = cross_entropy_backward_reference(logits_TV, labels_T, lse_T, grad_T, first).float()
    turned_VT = (grad_TV * turned_factor).clamp(-57344, 57344).t()
    turned_VW.copy_(torch.nn.functional.pad(turned_VT, (0, turned_VW.shape[1] - len(logits_TV))))
    return rows_TV.copy_((grad_TV * factor_T[:, None]).clamp(-448, 448)), turned_VW


@torch.library.register_fake(cross_entropy_backward_fp8)
def _(
    logits_TV: Tensor, labels_T: Tensor, lse_T: Tensor, grad_T: Tensor, first: int, factor_T: Tensor, turned_factor: Tensor
) -> tuple[Tensor, Tensor]:
    return _empty(logits_TV)
