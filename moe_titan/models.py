"""torchtitan's models with our layers in them."""

import torch
from torch import Tensor, nn
from torchtitan.models.attention import create_varlen_metadata_for_document
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.model import AttentionMasksType, BaseModelArgs

from kernels.document_attention import find_documents
from moe_titan.layers.attention import DocumentAttention, DocumentMask
from moe_titan.layers.head import Head
from moe_titan.layers.moe import MoE
from moe_titan.layers.prediction import predicting
from parallelisms.blocks import blocks

MODELS: dict[str, type[nn.Module]] = {"llama3": Transformer, "qwen3": Qwen3Model, "deepseek_v3": DeepSeekV3Model}


def build_model(name: str, args: BaseModelArgs, mtp_layers: int = 0) -> nn.Module:
    """The model of the given arguments on the meta device: torchtitan's names and shapes, our MoE, head and flex attention.

    Args:
        mtp_layers: tokens to predict beyond the next, each with a block of the kind of the last layer.
    """
    with torch.device("meta"):
        model = predicting(MODELS[name])(args, mtp_layers) if mtp_layers else MODELS[name](args)
        for layer, block in blocks(model).items():
            if getattr(block, "moe_enabled", False):
                block.moe = MoE(args.moe_args, args.dim, args.moe_inter_dim, layer)
        model.output = Head(args.dim, args.vocab_size)
        if getattr(model, "enable_weight_tying", False):
            model.output.weight = model.tok_embeddings.weight
    if getattr(args, "attn_type", "sdpa") == "flex":
        for block in blocks(model).values():
            block.attention.inner_attention = DocumentAttention()
    return model


def attention_masks(args: BaseModelArgs, tokens_BS: Tensor, eos_id: int) -> AttentionMasksType | None:
    """What the model's attention type takes: None for SDPA, else causal masks, within documents for block-causal flavors."""
    match getattr(args, "attn_type", "sdpa"):
        case "flex":
            begins_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
            if args.attn_mask_type == "block_causal":
                begins_BS[:, 1:] = tokens_BS[:, :-1] == eos_id
            return DocumentMask(find_documents(begins_BS))
        case "varlen":
            return create_varlen_metadata_for_document(tokens_BS, eos_id)
        case _:
            return None
