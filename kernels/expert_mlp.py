"""The experts' SwiGLU feed-forward over grouped rows as one differentiable function."""

import torch
from torch import Tensor

from kernels.grouped_mm import grouped_mm, grouped_mm_weight_grad
from kernels.swiglu import weighted_swiglu, weighted_swiglu_backward


def expert_mlp_reference(rows_RD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    """A loop over the experts in plain PyTorch, differentiable by autograd, in any dtype; rows past the last offset are zero."""
    outputs, start = [], 0
    for w13_2FD, w2_DF, end in zip(w13_E2FD, w2_EDF, offsets_E.tolist(), strict=True):
        x_rD = rows_RD[start:end]
        act_rF = torch.nn.functional.silu(x_rD @ w13_2FD[0].t()) * (x_rD @ w13_2FD[1].t())
        outputs.append((act_rF * weights_R[start:end, None].to(act_rF.dtype)) @ w2_DF.t())
        start = end
    outputs.append(rows_RD.new_zeros(rows_RD.shape[0] - start, rows_RD.shape[1]))
    return torch.cat(outputs)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, w13_E2FD, w2_EDF, weights_R, offsets_E):
        gate_up_R2F = grouped_mm(rows_RD, w13_E2FD.flatten(1, 2).transpose(1, 2), offsets_E)
        gate_up_R2F = gate_up_R2F.view(-1, *w13_E2FD.shape[1:3])
        act_RF = weighted_swiglu(gate_up_R2F, weights_R, offsets_E[-1:])
        ctx.save_for_backward(rows_RD, w13_E2FD, w2_EDF, weights_R, offsets_E, gate_up_R2F)
        return grouped_mm(act_RF, w2_EDF.transpose(1, 2), offsets_E)

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, w13_E2FD, w2_EDF, weights_R, offsets_E, gate_up_R2F = ctx.saved_tensors
        grad_RD = grad_RD.contiguous()
        grad_act_RF = grouped_mm(grad_RD, w2_EDF, offsets_E)
        grad_gate_up_R2F, grad_weights_R, act_RF = weighted_swiglu_backward(grad_act_RF, gate_up_R2F, weights_R, offsets_E[-1:])
        grad_w2_EDF = grouped_mm_weight_grad(grad_RD, act_RF, offsets_E)
        grad_gate_up = grad_gate_up_R2F.flatten(1, 2)
        grad_rows_RD = grouped_mm(grad_gate_up, w13_E2FD.flatten(1, 2), offsets_E)
        grad_w13 = grouped_mm_weight_grad(grad_gate_up, rows_RD, offsets_E)
        return grad_rows_RD, grad_w13.view_as(w13_E2FD), grad_w2_EDF, grad_weights_R, None


def expert_mlp(rows_RD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    """``w2[e] @ (weight * silu(w1[e] x) * (w3[e] x))`` for every row of every local expert.

    Args:
        rows_RD: [R, D] grouped by expert.
        w13_E2FD: [E, 2, F, D], w1 (gate) and w3 (up) of each expert side by side, so that one product serves both.
        w2_EDF: [E, D, F].
        weights_R: [R] fp32 routing weights.
        offsets_E: [E] int32 ends of the groups.
    Returns:
        [R, D]; rows past the last offset are unspecified. Saves the rows and the gate/up pre-activations for backward;
        the activation is recomputed.
    """
    return _ExpertMLP.apply(rows_RD, w13_E2FD, w2_EDF, weights_R, offsets_E)
