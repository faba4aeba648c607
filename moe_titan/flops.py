"""Model FLOPs, parameter counts and the peaks that model FLOPs utilisation (MFU) is measured against."""

from typing import TypeAlias

from torch import nn
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs

ModelArgs: TypeAlias = Qwen3ModelArgs | DeepSeekV3ModelArgs | TransformerModelArgs

# Dense bf16 peaks of the vendors' data sheets, FLOP/s. The first name contained in the device's name counts.
_PEAK_FLOPS = {
    "GB300": 2500e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "MI355X": 2500e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
}


def train_flops_per_token(model_args: ModelArgs, seq_len: int, mtp_layers: int = 0) -> float:
    """FLOPs of the model's matrix products for one trained token: forward, and twice that backward.

    Attention counts half of the `seq_len x seq_len` scores (causal; document boundaries are not taken into account).
    Embeddings, norms, activations and recomputation are not counted.

    Args:
        mtp_layers: tokens predicted beyond the next: each with a block like the last, a joining projection and the head.
    """
    if isinstance(model_args, DeepSeekV3ModelArgs):
        attention = _mla_weights(model_args)
        head_dims = model_args.qk_nope_head_dim + model_args.qk_rope_head_dim + model_args.v_head_dim
    else:
        head_dim = model_args.head_dim if isinstance(model_args, Qwen3ModelArgs) else model_args.dim // model_args.n_heads
        attention = _gqa_weights(model_args, head_dim)
        head_dims = 2 * head_dim
    dim, layers = model_args.dim, [*range(model_args.n_layers), *[model_args.n_layers - 1] * mtp_layers]
    scores = len(layers) * model_args.n_heads * head_dims * seq_len / 2
    weights = len(layers) * attention + sum(_ffn_weights(model_args, layer) for layer in layers)
    weights += (1 + mtp_layers) * dim * model_args.vocab_size + mtp_layers * 2 * dim * dim
    return 3 * 2 * (weights + scores)


def num_parameters(model: nn.Module) -> int:
    """Number of parameters of the whole model, whatever part of a sharded one (DTensor) lies on this rank."""
    return sum(parameter.numel() for parameter in model.parameters())


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU in FLOP/s by its `torch.cuda.get_device_name()`, or None if it is not known.

    A MIG slice is a part of a GPU that its name does not tell the size of: not known.
    """
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


def _gqa_weights(args: Qwen3ModelArgs | TransformerModelArgs, head_dim: int) -> int:
    """Weights of one layer's wq, wk, wv and wo."""
    n_kv_heads = args.n_heads if args.n_kv_heads is None else args.n_kv_heads
    return 2 * args.dim * head_dim * (args.n_heads + n_kv_heads)


def _mla_weights(args: DeepSeekV3ModelArgs) -> int:
    """Weights of one layer's multi-head latent attention: queries, keys and values through their low ranks, wo."""
    query_out = args.n_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim)
    query = args.q_lora_rank * (args.dim + query_out) if args.q_lora_rank else args.dim * query_out
    key_value_down = args.dim * (args.kv_lora_rank + args.qk_rope_head_dim)
    key_value_up = args.kv_lora_rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
    return query + key_value_down + key_value_up + args.n_heads * args.v_head_dim * args.dim


def _ffn_weights(args: ModelArgs, layer: int) -> int:
    """Weights that one token meets in the feed-forward part of a layer."""
    if isinstance(args, DeepSeekV3ModelArgs):
        if layer < args.n_dense_layers:
            return 3 * args.dim * args.inter_dim
        return _moe_weights(args.moe_args, args.dim, args.moe_inter_dim)
    if isinstance(args, Qwen3ModelArgs):
        if args.moe_enabled:
            return _moe_weights(args.moe_args, args.dim, args.moe_inter_dim)
        return 3 * args.dim * args.hidden_dim
    hidden_dim = int(2 * 4 * args.dim / 3)
    if args.ffn_dim_multiplier is not None:
        hidden_dim = int(args.ffn_dim_multiplier * hidden_dim)
    hidden_dim = -(-hidden_dim // args.multiple_of) * args.multiple_of
    return 3 * args.dim * hidden_dim


def _moe_weights(moe_args: MoEArgs, dim: int, expert_dim: int) -> int:
    """Weights that one token meets in one MoE layer: the gate, its top-k experts and the shared experts."""
    experts = moe_args.top_k + moe_args.num_shared_experts
    return dim * moe_args.num_experts + experts * 3 * dim * expert_dim
