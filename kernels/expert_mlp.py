"""The experts' SwiGLU feed-forward over grouped rows as one differentiable function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.grouped_mm import grouped_mm, grouped_mm_weight_grad
from kernels.packed_tokens import PackedTokens, Packing
from kernels.permute import TokenGradients, gather_sum, spread_rows
from kernels.swiglu import weighted_swiglu, weighted_swiglu_backward

Operand = Any
Tokens = Tensor | PackedTokens


class Kept(NamedTuple):
    """What :meth:`Products.keep` gave for rows that begin at row ``first``, or at 0 if it is None; see :mod:`kernels.stash`."""

    gate_up: Tensor
    first: Tensor | None = None


class TokenRows(NamedTuple):
    """Rows that are tokens, ``x_ND[pair_R[r] // K]``, and that ``row_NK`` names; see :func:`expert_mlp`."""

    x_ND: Tokens
    pair_R: Tensor
    row_NK: Tensor


class Products:
    """The three grouped products of a weight w_ENK and what makes their operands, of which low-precision recipes have their own.

    An operand is a tensor, or what a recipe's own methods return in place of one. ``packing``: how tokens travel to the experts,
    None for as they are. ``takes_token_grads``: backward may get the gradients of tokens in place of those of their rows.
    """

    packing: Packing | None = None
    takes_token_grads = False

    def spread(self, x_ND: Tokens, row_NK: Tensor, num_rows: int) -> tuple[Operand, Tokens]:
        """Tokens spread to their rows, for :meth:`output`, and what backward is to have of them."""
        return self.rows(x_ND, row_NK, num_rows), x_ND

    def rows(self, x_ND: Tokens, row_NK: Tensor, num_rows: int) -> Operand:
        """Tokens, or gradients of tokens, spread to their rows."""
        return spread_rows(x_ND, row_NK, num_rows)

    def swiglu(self, gate_up_R2F: Tensor, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor) -> Operand:
        """Activation [R, F], for :meth:`output`."""
        return weighted_swiglu(gate_up_R2F, weights_P, pair_R, num_rows)

    def keep(self, gate_up_R2F: Tensor, num_rows: Tensor) -> Tensor:
        """What backward is to have of the pre-activations, [R, ...]."""
        return gate_up_R2F

    def swiglu_backward(
        self, grad_RF: Tensor, kept: Kept, weights_P: Tensor, pair_R: Tensor, num_rows: Tensor
    ) -> tuple[Operand, Operand, Tensor, Operand]:
        """Gradient of the pre-activations [R, 2 F] for :meth:`input_grad` and again for :meth:`weight_grad`, gradient of the
        routing weights [P], activation [R, F] for :meth:`weight_grad`."""
        grad_gate_up_R2F, grad_weights_P, act_RF = weighted_swiglu_backward(
            grad_RF, kept.gate_up, weights_P, pair_R, num_rows, kept.first
        )
        grad_gate_up = grad_gate_up_R2F.flatten(1, 2)
        return grad_gate_up, grad_gate_up, grad_weights_P, act_RF

    def output_grad(self, grad: Tensor | TokenRows, num_rows: Tensor) -> tuple[Operand, Operand]:
        """Gradient of the output [R, D] for :meth:`input_grad` and again for :meth:`weight_grad`."""
        if isinstance(grad, Tensor):
            return grad, grad
        return self.rows(grad.x_ND, grad.row_NK, len(grad.pair_R)), grad

    def output(self, x_RK: Operand, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        """``x @ w[e]^T`` [R, N]."""
        return grouped_mm(x_RK, w_ENK.transpose(1, 2), offsets_E)

    def input_grad(self, grad_RN: Operand, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        """``grad @ w[e]`` [R, K]."""
        return grouped_mm(grad_RN, w_ENK, offsets_E)

    def weight_grad(self, grad_RN: Operand | TokenRows, x_RK: Operand | TokenRows, offsets_E: Tensor) -> Tensor:
        """``grad^T @ x`` over the rows of e [E, N, K], zero for an empty group."""
        return grouped_mm_weight_grad(as_rows(grad_RN), as_rows(x_RK), offsets_E)


def as_rows(x: Tensor | TokenRows) -> Tensor:
    return spread_rows(x.x_ND, x.row_NK, len(x.pair_R)) if isinstance(x, TokenRows) else x


HIGH_PRECISION = Products()


def expert_mlp_reference(
    x_ND: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, weights_P: Tensor, pair_R: Tensor, offsets_E: Tensor
) -> Tensor:
    """A loop over the experts in plain PyTorch, differentiable by autograd, in any dtype; rows past the last offset are zero."""
    choices = max(len(weights_P) // max(len(x_ND), 1), 1)
    outputs, start = [], 0
    for w13_2FD, w2_DF, end in zip(w13_E2FD, w2_EDF, offsets_E.tolist(), strict=True):
        pair_r = pair_R[start:end].long()
        x_rD = x_ND[pair_r // choices]
        act_rF = torch.nn.functional.silu(x_rD @ w13_2FD[0].t()) * (x_rD @ w13_2FD[1].t())
        outputs.append((act_rF * weights_P[pair_r, None].to(act_rF.dtype)) @ w2_DF.t())
        start = end
    outputs.append(x_ND.new_zeros(pair_R.shape[0] - start, x_ND.shape[1]))
    return torch.cat(outputs)


def _up(rows_RD: Operand, w13_E2FD: Tensor, offsets_E: Tensor, products: Products) -> Tensor:
    """Gate and up pre-activations [R, 2, F] of the rows, in one product."""
    return products.output(rows_RD, w13_E2FD.flatten(1, 2), offsets_E).view(-1, *w13_E2FD.shape[1:3])


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_ND,
        packed_NW,
        w13_E2FD,
        w2_EDF,
        weights_P,
        pair_R,
        row_NK,
        offsets_E,
        recompute,
        products,
        put_off,
        stash,
        grads,
        needed,
    ):
        ctx.products, ctx.put_off, ctx.grads = products, put_off, grads
        tokens = x_ND if packed_NW is None else products.packing.received(packed_NW, x_ND.shape[1])
        if needed:
            rows, tokens = products.spread(tokens, row_NK, len(pair_R))
        else:
            rows = products.rows(tokens, row_NK, len(pair_R))
        ctx.tokens, words_NW = None, None
        if isinstance(tokens, PackedTokens):
            x_ND, words_NW, ctx.tokens = None, tokens.words_NW, tokens._replace(words_NW=None)
        gate_up_R2F = _up(rows, w13_E2FD, offsets_E, products)
        del rows
        act_RF = products.swiglu(gate_up_R2F, weights_P, pair_R, offsets_E[-1:])
        kept = None if recompute else products.keep(gate_up_R2F, offsets_E[-1:])
        del gate_up_R2F
        # Not a saved tensor, since other layers write to the same one.
        ctx.stashed = None if kept is None or stash is None else stash(kept, offsets_E[-1:])
        kept = None if ctx.stashed is not None else kept
        ctx.save_for_backward(x_ND, words_NW, w13_E2FD, w2_EDF, weights_P, pair_R, row_NK, offsets_E, kept)
        return products.output(act_RF, w2_EDF, offsets_E)

    @staticmethod
    def backward(ctx, grad_RD):
        x_ND, words_NW, w13_E2FD, w2_EDF, weights_P, pair_R, row_NK, offsets_E, gate_up = ctx.saved_tensors
        products, grad_ND = ctx.products, None if ctx.grads is None else ctx.grads.take()
        grad = grad_RD.contiguous() if grad_ND is None else TokenRows(grad_ND, pair_R, row_NK)
        operand, grad = products.output_grad(grad, offsets_E[-1:])
        tokens = x_ND if ctx.tokens is None else ctx.tokens._replace(words_NW=words_NW)
        if ctx.stashed is None and gate_up is None:
            gate_up = _up(products.rows(tokens, row_NK, len(pair_R)), w13_E2FD, offsets_E, products)
        kept = ctx.stashed or Kept(gate_up)
        del gate_up
        # Here is a step's peak of memory: what has been used must not wait for the end.
        grad_act_RF = products.input_grad(operand, w2_EDF, offsets_E)
        del operand
        grad_operand, grad_gate_up, grad_weights_P, act = products.swiglu_backward(
            grad_act_RF, kept, weights_P, pair_R, offsets_E[-1:]
        )
        del grad_act_RF, kept
        grad_w2_EDF = products.weight_grad(grad, act, offsets_E)
        del act, grad, grad_ND
        grad_x_ND = gather_sum(products.input_grad(grad_operand, w13_E2FD.flatten(1, 2), offsets_E), row_NK)
        del grad_operand

        def grad_w13() -> Tensor:
            # Copied as late as possible, so that the rows live for one product only.
            return products.weight_grad(grad_gate_up, TokenRows(tokens, pair_R, row_NK), offsets_E).view_as(w13_E2FD)

        if ctx.put_off is None:
            grad_w13_E2FD = grad_w13()
        else:
            ctx.put_off(grad_w13)
            grad_w13_E2FD = w13_E2FD.new_empty(()).expand_as(w13_E2FD)
        return grad_x_ND, None, grad_w13_E2FD, grad_w2_EDF, grad_weights_P, *[None] * 9


def expert_mlp(
    x_ND: Tensor,
    w13_E2FD: Tensor,
    w2_EDF: Tensor,
    weights_P: Tensor,
    pair_R: Tensor,
    row_NK: Tensor,
    offsets_E: Tensor,
    recompute: bool = False,
    products: Products = HIGH_PRECISION,
    put_off: Callable[[Callable[[], Tensor]], None] | None = None,
    stash: Callable[[Tensor, Tensor], Kept | None] | None = None,
    packed_NW: Tensor | None = None,
    grads: TokenGradients | None = None,
) -> Tensor:
    """``w2[e] @ (weight * silu(w1[e] x) * (w3[e] x))`` for every row of every local expert.

    Row r is token ``pair_R[r] // K`` with weight ``weights_P[pair_R[r]]``.

    Args:
        x_ND: [N, D] tokens.
        w13_E2FD: [E, 2, F, D], w1 (gate) and w3 (up) of each expert side by side, so that one product serves both.
        w2_EDF: [E, D, F].
        weights_P: [N * K] fp32 routing weights.
        pair_R: [R] int32, the pairs grouped by expert; -1 past the last group.
        row_NK: [N, K] int32, where each pair stands in that order, -1 for nowhere.
        offsets_E: [E] int32 ends of the groups.
        recompute: make the pre-activations again in backward, two ninths more products, instead of keeping them.
        products: the grouped products.
        put_off: takes, in backward, what makes the gradient of w13, which then comes from whoever calls that; autograd gets a
            tensor that means nothing in its place.
        stash: takes what is to be kept of the pre-activations, [R, ...], and how many of its rows hold data, and keeps these;
            returns None if it does not, and they are kept as they are.
        packed_NW: the tokens as the products' ``packing`` packed them; of x, shape, dtype and gradient alone count then.
        grads: may have, in backward, the gradients of tokens [N, D], to which the rows of this output are added up.
    Returns:
        [R, D]; rows past the last offset are unspecified. Saves for backward the tokens and the gate/up pre-activations
        [R, 2, F], as the products keep them, and the indices; rows and activation are made again.
    """
    indices = pair_R, row_NK, offsets_E
    needed = torch.is_grad_enabled()  # else nothing is kept
    ways = recompute or not needed, products, put_off, stash, grads, needed
    return _ExpertMLP.apply(x_ND, packed_NW, w13_E2FD, w2_EDF, weights_P, *indices, *ways)
