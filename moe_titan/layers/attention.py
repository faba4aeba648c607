"""Attention of the models whose ``attn_type`` is "flex": causal, within documents or within rows."""

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from kernels.document_attention import Documents, document_attention


class DocumentMask(BlockMask):
    """What torchtitan's models hand from their caller to :class:`DocumentAttention`; they insist on the type."""

    def __init__(self, documents: Documents):
        self.documents = documents


class DocumentAttention(nn.Module):
    """Takes the place of flex attention, which pads heads to a power of two and tries many block sizes on the first step."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: DocumentMask, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        """Queries [B, H, S, D], keys and values of H or fewer heads to [B, H, S, DV]; the shapes say what ``enable_gqa`` does."""
        return document_attention(q, k, v, block_mask.documents, q.shape[-1] ** -0.5 if scale is None else scale)
