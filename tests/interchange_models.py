"""Small models in `transformers` and here, and what they compute, for comparing one with the other."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from moe_titan.interchange.dcp import Checkpoint
from moe_titan.models import build_model
from parallelisms.sharding_plan import logical_tensors

VOCAB, SEQ = 40, 24
TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))

_SMALL = dict(vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.2)
_QWEN3 = _SMALL | dict(hidden_size=24, intermediate_size=36, num_key_value_heads=2, head_dim=6)
_DEEPSEEK = _SMALL | dict(
    hidden_size=24,
    intermediate_size=40,
    moe_intermediate_size=12,
    num_key_value_heads=4,
    n_routed_experts=6,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    kv_lora_rank=12,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=5,
    num_nextn_predict_layers=0,
)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)
_LLAMA = _SMALL | dict(hidden_size=32, intermediate_size=36, num_key_value_heads=2, rms_norm_eps=1e-5)
# Of its wavelengths, 6 to 200, some are under 32 / 4, some over 32, and one between.
_LLAMA_ROPE = dict(rope_type="llama3", rope_theta=1e2, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA_ROPE |= dict(original_max_position_embeddings=32)

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA),
    "llama, scaled rope": LlamaConfig(**_LLAMA, rope_parameters=_LLAMA_ROPE),
    "qwen3": Qwen3Config(**_QWEN3),
    "qwen3, tied": Qwen3Config(**_QWEN3, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **_QWEN3, moe_intermediate_size=12, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True, tie_word_embeddings=False
    ),
    "deepseek_v3": DeepseekV3Config(**_DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1),
    "deepseek_v3, groups and yarn": DeepseekV3Config(
        **_DEEPSEEK, q_lora_rank=8, n_group=3, topk_group=2, rope_parameters=_YARN, norm_topk_prob=True
    ),
}


def write_transformers(name: str, path: Path, layers: int = 2, **save: Any) -> Tensor:
    """Saves a random model of a configuration of ``CONFIGS`` as `transformers` does; returns its logits for ``TOKENS``, fp32."""
    torch.manual_seed(len(name))
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    model = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(path, **save)
    return _logits_of(model)


def transformers_logits(path: Path) -> Tensor:
    return _logits_of(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@torch.no_grad()
def _logits_of(model: torch.nn.Module) -> Tensor:
    model.set_experts_implementation("eager")  # The others want aligned sizes.
    return model.eval()(TOKENS).logits


@torch.no_grad()
def our_logits(name: str, args: Any, checkpoint: Path) -> Tensor:
    """Logits for ``TOKENS`` of the model here, its parameters read from a checkpoint of torchtitan's keys."""
    stored = Checkpoint(checkpoint)
    model = build_model(name, args).to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))
    for key, parameter in model.named_parameters():
        for logical, part in logical_tensors(key, parameter):
            part.copy_(stored.tensor(logical).load())
    for key, buffer in model.named_buffers():
        if key.endswith("expert_bias"):
            buffer.copy_(stored.tensor(key).load())
    return model(TOKENS)
