"""Which tensors a model has, and what Hugging Face calls them: the tables of torchtitan's state-dict adapters.

The adapters convert whole state dicts; here they serve one tensor at a time. What they drop without a word (``expert_bias`` of
Qwen3) has no names here and is for the caller to judge. Experts are handled here, where none need be stacked or split.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from moe_titan.interchange.architectures import ARCHITECTURES, model_type_of
from moe_titan.layers.prediction import predicting
from moe_titan.models import MODELS

OUTPUT, EMBEDDING = "output.weight", "tok_embeddings.weight"
MTP = "mtp_layers."
# What DeepSeek's blocks that predict further tokens have besides, as layers behind the last, and what they store anew.
_PREDICTION = {
    "model.layers.{}.enorm.weight": "layers.{}.enorm.weight",
    "model.layers.{}.hnorm.weight": "layers.{}.hnorm.weight",
    "model.layers.{}.eh_proj.weight": "layers.{}.eh_proj.weight",
    "model.layers.{}.shared_head.norm.weight": "layers.{}.mtp_norm.weight",
}
_SHARED = {EMBEDDING: "model.layers.{}.embed_tokens.weight", OUTPUT: "model.layers.{}.shared_head.head.weight"}


@dataclass(frozen=True)
class Naming:
    """Shapes of a model's tensors under its own keys, in the model's order, and their names in Hugging Face's files.

    ``names`` has a list for each expert weight, one name an expert, and None where Hugging Face has no counterpart.
    ``copies`` are names under which a tensor stands there once more. ``adapter`` converts a state dict of one tensor that is not
    an expert weight, under its :func:`layer_key`.
    """

    shapes: dict[str, tuple[int, ...]]
    names: dict[str, str | list[str] | None]
    copies: dict[str, list[str]]
    adapter: StateDictAdapter


def layer_key(key: str, args: Any) -> str:
    """As Hugging Face counts blocks: those that predict further tokens are layers behind the last."""
    return re.sub(r"^mtp_layers\.(\d+)", lambda match: f"layers.{args.n_layers + int(match[1])}", key)


def naming(name: str, args: Any, mtp_layers: int = 0) -> Naming:
    args = copy.deepcopy(args)
    if (moe_args := getattr(args, "moe_args", None)) is not None and moe_args.load_balance_coeff is None:
        moe_args.load_balance_coeff = 1e-3  # The bias is among the keys in any case.
    with torch.device("meta"):
        model = predicting(MODELS[name])(args, mtp_layers) if mtp_layers else MODELS[name](args)
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    tied = getattr(args, "enable_weight_tying", False)
    if tied:
        args.enable_weight_tying = False  # from_hf wants a whole state dict otherwise.
    adapter = ARCHITECTURES[model_type_of(name, args)].adapter(args, None)
    unknown = {OUTPUT} if tied else set()
    copies: dict[str, list[str]] = {}
    if name == "deepseek_v3":
        adapter.from_hf_map |= _PREDICTION
        copies = {key: [copied.format(args.n_layers + depth) for depth in range(mtp_layers)] for key, copied in _SHARED.items()}
    else:
        unknown |= {key for key in shapes if key.startswith(MTP)}
    table = {ours: theirs for theirs, ours in adapter.from_hf_map.items() if ours is not None}
    names = {key: None if key in unknown else _name(layer_key(key, args), shape, table) for key, shape in shapes.items()}
    return Naming(shapes, names, copies, adapter)


def _name(key: str, shape: tuple[int, ...], table: dict[str, str]) -> str | list[str] | None:
    layer = match[1] if (match := re.match(r"layers\.(\d+)\.", key)) else None
    if (template := table.get(re.sub(r"\d+", "{}", key, count=1) if layer else key)) is None:
        return None
    if template.count("{}") == 2:
        return [template.format(layer, expert) for expert in range(shape[0])]
    return template.format(layer) if layer else template
