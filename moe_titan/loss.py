"""Cross-entropy over the trained tokens, as a sum: the step divides once, by the tokens of the global batch."""

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

IGNORED = -100
"""Label of a position that is not trained on."""


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum over trained positions of the negative log-likelihood, in fp32 or wider.

    Args:
        logits_BSV: any floating dtype; a DTensor cut along the vocabulary needs :func:`loss_context` here and in backward.
        labels_BS: int64, ``IGNORED`` where not trained.
    """
    logits = logits_BSV.flatten(0, 1)
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(wide, labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_context(sharded_vocabulary: bool) -> AbstractContextManager:
    """Within it, cross-entropy of DTensor logits works on each rank's slice of the vocabulary."""
    return loss_parallel() if sharded_vocabulary else nullcontext()


def loss_value(loss: Tensor) -> Tensor:
    return loss.to_local() if isinstance(loss, DTensor) else loss
