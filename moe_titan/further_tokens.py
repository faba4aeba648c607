"""The batch that multi-token prediction trains on at one depth, made of the one that the model trains on."""

import torch
from torch import Tensor

from moe_titan.data import IGNORED, MicroBatch


def further_on(batch: MicroBatch, depth: int, eos_id: int | None) -> MicroBatch:
    """At each position the token ``depth`` further on, and as its label the one behind that.

    Valid are positions at which the token is there, in the same sample and document, and neither is padding. Trained are labels
    that the model itself trains on and that lie in the position's document.

    Args:
        eos_id: token that ends a document; None where samples are one document each, whatever is in them.
    """
    tokens_BS, labels_BS = batch.tokens_BS.roll(-depth, 1), batch.labels_BS.roll(-depth, 1)
    place_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    valid_BS = (place_S < len(place_S) - depth).expand_as(tokens_BS)
    if batch.valid_BS is not None:
        valid_BS = valid_BS & batch.valid_BS & batch.valid_BS.roll(-depth, 1)
    trained_BS = valid_BS
    if eos_id is not None:
        document_BS = _documents_before(batch.tokens_BS == eos_id)
        valid_BS = valid_BS & (document_BS == document_BS.roll(-depth, 1))
        trained_BS = valid_BS & (tokens_BS != eos_id)
    return MicroBatch(tokens_BS, torch.where(trained_BS, labels_BS, IGNORED), valid_BS)


def _documents_before(ends_BS: Tensor) -> Tensor:
    """How many documents end before each position."""
    return ends_BS.cumsum(1) - ends_BS.long()
