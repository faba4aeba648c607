"""Auxiliary losses that pull the experts' load level: per sequence and per batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.route import largest


@dataclass(frozen=True)
class BalanceLoss:
    """``coeff * E / (K n) * sum_e c_e * mean_t P_te`` over the n valid tokens of each sequence, or of the whole micro-batch.

    P are the scores normalised over the experts, c the top-K counts of those scores without expert bias (Switch
    Transformer, arXiv 2101.03961; per sequence: DeepSeek-V3, arXiv 2412.19437). Uniform routing gives ``coeff``. The mean over
    sequences or micro-batches is weighted by tokens: each term enters the step's loss times n / trained tokens of the global
    batch, so gradients of all ranks and micro-batches simply add up.

    Args:
        sequence_coeff, batch_coeff: weights of the two losses; 0 is off.
        sequence_group: ranks that share each sequence (tensor and context parallel), None if a rank holds whole sequences.
        batch_group: ranks that share the micro-batch, None for one.
    """

    top_k: int
    sequence_coeff: float
    batch_coeff: float
    sequence_group: ProcessGroup | None = None
    batch_group: ProcessGroup | None = None

    def __call__(self, scores_TE: Tensor, valid_T: Tensor | None, num_sequences: int, denominator: Tensor | float) -> Tensor:
        """This rank's share of the loss (the sum over ranks is the loss): fp32 scalar with gradient to the scores."""
        probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, largest(scores_TE.detach(), self.top_k), 1.0)
        if valid_T is not None:
            probs_TE, chosen_TE = probs_TE * valid_T[:, None], chosen_TE * valid_T[:, None]
        probs_BE = probs_TE.unflatten(0, (num_sequences, -1)).sum(1)
        counts_BE = chosen_TE.unflatten(0, (num_sequences, -1)).sum(1)
        loss = scores_TE.new_zeros(())
        if self.sequence_coeff:
            loss = loss + self.sequence_coeff * self._term(probs_BE, counts_BE, self.sequence_group)
        if self.batch_coeff:
            batch = (probs_BE.sum(0, keepdim=True), counts_BE.sum(0, keepdim=True))
            loss = loss + self.batch_coeff * self._term(*batch, self.batch_group)
        return loss / denominator

    def _term(self, probs_BE: Tensor, counts_BE: Tensor, group: ProcessGroup | None) -> Tensor:
        counts_BE = counts_BE.contiguous()
        if group is not None:
            dist.all_reduce(counts_BE, group=group)
        tokens_B1 = counts_BE.sum(1, keepdim=True) / self.top_k
        load_BE = counts_BE * counts_BE.shape[1] / (self.top_k * tokens_B1.clamp(min=1))
        return (probs_BE * load_BE).sum()


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, ctx.loss_like


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x unchanged; whoever differentiates through x differentiates ``loss`` along with it, with weight 1."""
    return _AttachLoss.apply(x, loss)
