"""Model architectures as Hugging Face's config.json describes them, and as torchtitan's arguments do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.moe.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from moe_titan.interchange.tensors import InterchangeError

JsonObject = dict[str, Any]
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Architecture:
    """One ``model_type`` of Hugging Face's.

    ``fixed`` are keys of config.json with the only value that torchtitan's model computes, also what a missing key means.
    ``differences`` says what in the arguments has no counterpart in Hugging Face's model.
    """

    model: str
    class_name: str
    adapter: type[StateDictAdapter]
    fixed: JsonObject
    read: Callable[[JsonObject], BaseModelArgs]
    write: Callable[[Any], JsonObject]
    differences: Callable[[Any], list[str]]


def args_from_config(config: JsonObject) -> tuple[str, BaseModelArgs]:
    """Name and arguments of the model that a config.json describes. ``max_seq_len`` is the longest that it was made for.

    Raises:
        InterchangeError: another architecture, or an option of it that torchtitan's model lacks.
    """
    architecture = ARCHITECTURES.get(config.get("model_type", ""))
    if architecture is None:
        raise InterchangeError(
            f"config.json: model_type = {config.get('model_type')!r}; can be converted: {', '.join(ARCHITECTURES)}"
        )
    for key, only in architecture.fixed.items():
        if (value := config.get(key, only)) not in (only, None):
            raise InterchangeError(f"config.json: {key} = {value!r}: the model here computes {only!r} alone")
    try:
        args = architecture.read(config)
    except KeyError as error:
        raise InterchangeError(f"config.json: lacks {error}, which {config['model_type']} needs") from error
    return architecture.model, args


def config_from_args(name: str, args: Any) -> JsonObject:
    """The config.json of a model.

    Raises:
        InterchangeError: Hugging Face's model computes another function; the message says in what.
    """
    model_type = model_type_of(name, args)
    architecture = ARCHITECTURES[model_type]
    if differences := architecture.differences(args):
        raise InterchangeError(f"Hugging Face's {model_type} has no counterpart of {'; '.join(differences)}")
    return {"architectures": [architecture.class_name], "model_type": model_type} | architecture.write(args)


def model_type_of(name: str, args: Any) -> str:
    if name == "qwen3" and args.moe_enabled:
        return "qwen3_moe"
    return "llama" if name == "llama3" else name


def approximations(name: str, args: Any) -> list[str]:
    """Where Hugging Face's model and the one here differ a little, whatever is written into config.json."""
    if name == "deepseek_v3" and args.norm_eps != LATENT_NORM_EPS:
        return [
            f"norm_eps = {args.norm_eps}: transformers takes {LATENT_NORM_EPS} for the norms of the latents, the model here "
            "norm_eps for all; logits differ slightly"
        ]
    return []


def rope_of(config: JsonObject, scaling: str | None) -> tuple[float, JsonObject | None]:
    """Base of the rotary embedding, and its scaling, of type ``scaling`` or none; keys of transformers 4 and 5."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", scaling):
        raise InterchangeError(
            f"config.json: a rotary embedding scaled by {kind!r}: the model here has {scaling or 'none'!r} alone"
        )
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    return float(theta), None if kind == "default" else rope


def _read_llama(config: JsonObject) -> TransformerModelArgs:
    dim, heads, hidden = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    if (head_dim := config.get("head_dim") or dim // heads) * heads != dim:
        raise InterchangeError(f"config.json: head_dim = {head_dim}: the model here has hidden_size / num_attention_heads alone")
    theta, scaling = rope_of(config, "llama3")
    # torchtitan always scales; by a factor of 1 nothing changes.
    rope = RoPEScalingArgs(scaling_factor=1.0)
    if scaling:
        rope = RoPEScalingArgs(
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            scaling["original_max_position_embeddings"],
        )
    return TransformerModelArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        # The width is the next multiple of multiple_of: any start that is not wider gives the wanted one.
        multiple_of=hidden,
        ffn_dim_multiplier=min(1.0, hidden / (8 * dim / 3)),
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling_args=rope,
        max_seq_len=config["max_position_embeddings"],
    )


def llama_hidden_dim(args: TransformerModelArgs) -> int:
    hidden = int((args.ffn_dim_multiplier or 1) * int(8 * args.dim / 3))
    return args.multiple_of * -(-hidden // args.multiple_of)


def _write_llama(args: TransformerModelArgs) -> JsonObject:
    scaling = args.rope_scaling_args
    config = {
        "hidden_size": args.dim,
        "intermediate_size": llama_hidden_dim(args),
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": False,
    }
    if scaling.scaling_factor != 1:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return config | _write_common(args)


def _write_common(args: Any) -> JsonObject:
    return {
        "vocab_size": args.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "attention_bias": False,
    }


def _read_qwen3(config: JsonObject) -> Qwen3ModelArgs:
    theta, _ = rope_of(config, None)
    args = Qwen3ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        hidden_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        qk_norm=True,
        max_seq_len=config["max_position_embeddings"],
        enable_weight_tying=config.get("tie_word_embeddings", False),
    )
    if config["model_type"] == "qwen3_moe":
        args.moe_enabled = True
        args.moe_inter_dim = config["moe_intermediate_size"]
        args.moe_args = MoEArgs(
            num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            num_shared_experts=0,
            top_k=config["num_experts_per_tok"],
            score_func="softmax",
            route_norm=config["norm_topk_prob"],
            score_before_experts=False,
        )
    return args


def _write_qwen3(args: Qwen3ModelArgs) -> JsonObject:
    config = {
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_sliding_window": False,
    }
    if args.moe_enabled:
        config |= {
            "moe_intermediate_size": args.moe_inter_dim,
            "num_experts": args.moe_args.num_experts,
            "num_experts_per_tok": args.moe_args.top_k,
            "norm_topk_prob": args.moe_args.route_norm,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config | _write_common(args)


def _qwen3_differences(args: Qwen3ModelArgs) -> list[str]:
    differences = [] if args.qk_norm else ["qk_norm = false"]
    return differences + (
        _moe_differences(
            args.moe_args, {"score_func": "softmax", "num_shared_experts": 0, "route_scale": 1.0, "num_expert_groups": None}
        )
        if args.moe_enabled
        else []
    )


def _moe_differences(moe: MoEArgs, only: JsonObject) -> list[str]:
    only = only | {"gate_bias": False, "score_before_experts": False}
    return [f"moe_args.{key} = {getattr(moe, key)!r}" for key, value in only.items() if getattr(moe, key) != value]


def _read_deepseek(config: JsonObject) -> DeepSeekV3ModelArgs:
    theta, yarn = rope_of(config, "yarn")
    groups = config.get("n_group") or 1
    args = DeepSeekV3ModelArgs(
        max_seq_len=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        inter_dim=config["intermediate_size"],
        moe_inter_dim=config["moe_intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_dense_layers=config["first_k_dense_replace"],
        n_heads=config["num_attention_heads"],
        norm_eps=config["rms_norm_eps"],
        moe_args=MoEArgs(
            num_experts=config["n_routed_experts"],
            num_shared_experts=config["n_shared_experts"],
            top_k=config["num_experts_per_tok"],
            score_func="sigmoid",
            route_norm=config["norm_topk_prob"],
            route_scale=float(config["routed_scaling_factor"]),
            score_before_experts=False,
            num_expert_groups=groups if groups > 1 else None,
            num_limited_groups=config["topk_group"] if groups > 1 else None,
        ),
        q_lora_rank=config.get("q_lora_rank") or 0,
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_theta=theta,
        # torchtitan applies YaRN to sequences longer than this.
        original_seq_len=config["max_position_embeddings"],
    )
    if yarn:
        if not yarn.get("mscale") or yarn["mscale"] != yarn.get("mscale_all_dim"):
            raise InterchangeError("config.json: YaRN without mscale = mscale_all_dim: the model here has one number for both")
        args.original_seq_len = yarn["original_max_position_embeddings"]
        args.rope_factor = float(yarn["factor"])
        args.beta_fast, args.beta_slow = int(yarn.get("beta_fast", 32)), int(yarn.get("beta_slow", 1))
        args.mscale = float(yarn["mscale"])
    args.moe_impl = "standard"
    return args


def _write_deepseek(args: DeepSeekV3ModelArgs) -> JsonObject:
    moe = args.moe_args
    config = {
        "hidden_size": args.dim,
        "intermediate_size": args.inter_dim,
        "moe_intermediate_size": args.moe_inter_dim,
        "num_hidden_layers": args.n_layers,
        "first_k_dense_replace": args.n_dense_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.top_k,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": moe.route_norm,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.num_expert_groups or 1,
        "topk_group": moe.num_limited_groups or 1,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
    } | _write_common(args)
    if args.max_seq_len > args.original_seq_len:
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.original_seq_len,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale,
        }
        # Some readers take the factor from these two.
        config["max_position_embeddings"] = int(args.original_seq_len * args.rope_factor)
    return config


def _deepseek_differences(args: DeepSeekV3ModelArgs) -> list[str]:
    no_shared = [] if args.moe_args.num_shared_experts else ["moe_args.num_shared_experts = 0"]
    return _moe_differences(args.moe_args, {"score_func": "sigmoid"}) + no_shared


_DENSE = {"hidden_act": "silu", "attention_bias": False}
_QWEN3 = _DENSE | {"use_sliding_window": False}
ARCHITECTURES = {
    "llama": Architecture(
        "llama3",
        "LlamaForCausalLM",
        Llama3StateDictAdapter,
        _DENSE | {"mlp_bias": False},
        _read_llama,
        _write_llama,
        lambda args: [],
    ),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", Qwen3StateDictAdapter, _QWEN3, _read_qwen3, _write_qwen3, _qwen3_differences
    ),
    "qwen3_moe": Architecture(
        "qwen3",
        "Qwen3MoeForCausalLM",
        Qwen3StateDictAdapter,
        _QWEN3 | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        _read_qwen3,
        _write_qwen3,
        _qwen3_differences,
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DeepSeekV3StateDictAdapter,
        _DENSE
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        | {"rope_interleave": True, "tie_word_embeddings": False},
        _read_deepseek,
        _write_deepseek,
        _deepseek_differences,
    ),
}
