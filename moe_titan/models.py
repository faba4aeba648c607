"""torchtitan's models with our MoE layers in them."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask
from torchtitan.models.attention import (
    create_attention_mask,
    create_varlen_metadata_for_document,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.model import AttentionMasksType, BaseModelArgs

from moe_titan.layers.head import Head
from moe_titan.layers.moe import MoE

MODELS: dict[str, type[nn.Module]] = {"llama3": Transformer, "qwen3": Qwen3Model, "deepseek_v3": DeepSeekV3Model}


def build_model(name: str, args: BaseModelArgs) -> nn.Module:
    """The model of the given arguments on the meta device, MoE blocks and head ours, under torchtitan's names and shapes."""
    with torch.device("meta"):
        model = MODELS[name](args)
        for index, block in model.layers.items():
            if getattr(block, "moe_enabled", False):
                block.moe = MoE(args.moe_args, args.dim, args.moe_inter_dim, layer=f"layers.{index}")
        model.output = Head(args.dim, args.vocab_size)
        if getattr(model, "enable_weight_tying", False):
            model.output.weight = model.tok_embeddings.weight
    if getattr(args, "attn_type", "sdpa") == "flex" and not torch.cuda.is_available():
        for block in model.layers.values():
            block.attention.inner_attention = DenseMaskAttention()
    return model


class DenseMaskAttention(nn.Module):
    """Stands in for flex attention where it has no backward pass (CPU); :func:`attention_masks` has spelled out the mask."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        mask = block_mask.dense_mask
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def attention_masks(args: BaseModelArgs, tokens_BS: Tensor, eos_id: int) -> AttentionMasksType | None:
    """What the model's attention type takes: None for SDPA, else causal masks, within documents for block-causal flavors."""
    match getattr(args, "attn_type", "sdpa"):
        case "flex":
            mods = [get_causal_mask_mod()]
            if args.attn_mask_type == "block_causal":
                mods.append(get_document_mask_mod(tokens_BS, eos_id))
            (B, S), device = tokens_BS.shape, tokens_BS.device
            shape = (B if len(mods) > 1 else 1, None, S, S)
            if tokens_BS.is_cuda:
                return create_attention_mask(and_masks(*mods), *shape, device=device)
            mask = create_block_mask(and_masks(*mods), *shape, device=device)
            mask.dense_mask = create_mask(and_masks(*mods), *shape, device=device)
            return mask
        case "varlen":
            return create_varlen_metadata_for_document(tokens_BS, eos_id)
        case _:
            return None
