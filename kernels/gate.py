"""The router's linear in fp32 on inputs of any type, with a weight gradient that keeps all of a GPU busy."""

import torch
from torch import Tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _GateLogits(torch.autograd.Function):
    # The weight gradient is [E, T] x [T, D] with small E and D: one fp32 GEMM over all of T leaves most of the GPU idle,
    # a batch of partial products over slices of T does not.
    SLICES = 32

    @staticmethod
    def forward(ctx, x_TD, weight_ED):
        ctx.save_for_backward(x_TD, weight_ED)
        return x_TD.to(_wide(x_TD.dtype)) @ weight_ED.to(_wide(x_TD.dtype)).t()

    @staticmethod
    def backward(ctx, grad_TE):
        x_TD, weight_ED = ctx.saved_tensors
        wide = grad_TE.dtype
        grad_x_TD = (grad_TE @ weight_ED.to(wide)).to(x_TD.dtype)
        (T, D), E = x_TD.shape, weight_ED.shape[0]
        slices = _GateLogits.SLICES if x_TD.is_cuda and T % _GateLogits.SLICES == 0 else 1
        grad_CTE = grad_TE.reshape(slices, T // slices, E)
        x_CTD = x_TD.to(wide).reshape(slices, T // slices, D)
        grad_weight_ED = torch.bmm(grad_CTE.transpose(1, 2), x_CTD).sum(0)
        return grad_x_TD, grad_weight_ED.to(weight_ED.dtype)


def gate_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Router logits ``x @ weight^T`` in fp32 (fp64 for fp64 input): [T, E]. Saves x in its own type."""
    return _GateLogits.apply(x_TD, weight_ED)
