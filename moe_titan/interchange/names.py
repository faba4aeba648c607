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
from moe_titan.models import MODELS

OUTPUT, EMBEDDING = "output.weight", "tok_embeddings.weight"


@dataclass(frozen=True)
class Naming:
    """Shapes of a model's tensors under its own keys, in the model's order, and their names in Hugging Face's files.

    ``names`` has a list for each expert weight, one name an expert, and None where Hugging Face has no counterpart.
    ``adapter`` converts a state dict of one tensor that is not an expert weight.
    """

    shapes: dict[str, tuple[int, ...]]
    names: dict[str, str | list[str] | None]
    adapter: StateDictAdapter


def naming(name: str, args: Any) -> Naming:
    args = copy.deepcopy(args)
    if (moe_args := getattr(args, "moe_args", None)) is not None and moe_args.load_balance_coeff is None:
        moe_args.load_balance_coeff = 1e-3  # The bias is among the keys in any case.
    with torch.device("meta"):
        shapes = {key: tuple(tensor.shape) for key, tensor in MODELS[name](args).state_dict().items()}
    tied = getattr(args, "enable_weight_tying", False)
    if tied:
        args.enable_weight_tying = False  # from_hf wants a whole state dict otherwise.
    adapter = ARCHITECTURES[model_type_of(name, args)].adapter(args, None)
    table = {ours: theirs for theirs, ours in adapter.from_hf_map.items() if ours is not None}
    names = {key: None if tied and key == OUTPUT else _name(key, shape, table) for key, shape in shapes.items()}
    return Naming(shapes, names, adapter)


def _name(key: str, shape: tuple[int, ...], table: dict[str, str]) -> str | list[str] | None:
    layer = match[1] if (match := re.match(r"layers\.(\d+)\.", key)) else None
    if (template := table.get(re.sub(r"\d+", "{}", key, count=1) if layer else key)) is None:
        return None
    if template.count("{}") == 2:
        return [template.format(layer, expert) for expert in range(shape[0])]
    return template.format(layer) if layer else template
