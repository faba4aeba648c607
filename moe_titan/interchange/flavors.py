"""A model's arguments as a run's configuration states them: a flavor and what differs from it."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.qwen3 import qwen3_args

from moe_titan.config import ConfigError, build_model_args, load_config
from moe_titan.config.errors import show
from moe_titan.interchange.tensors import InterchangeError

_FLAVORS = {"llama3": llama3_args, "qwen3": qwen3_args, "deepseek_v3": deepseekv3_args}
# Choices of a run and not of its model, or without effect here.
_NOT_THE_MODEL = {
    *("max_seq_len", "max_batch_size", "attn_type", "attn_mask_type", "eos_id", "depth_init", "expert_parallel_comm_backend"),
    *("moe_args.use_grouped_mm", "moe_args.load_balance_coeff", "moe_args._debug_force_load_balance"),
}


def as_toml(name: str, args: Any, mtp_layers: int = 0) -> str:
    """The sections ``[model]`` and ``[model.overrides]`` that make :func:`build_model_args` build these arguments.

    Args:
        mtp_layers: for the section ``[mtp]``.
    """
    wanted = _flat(args)
    overrides = {
        flavor: {key: value for key, value in wanted.items() if value != flat.get(key)}
        for flavor, flat in ((flavor, _flat(other)) for flavor, other in _FLAVORS[name].items())
    }
    # TOML has no None to override a flavor's value with.
    flavor = min((f for f in overrides if None not in overrides[f].values()), key=lambda f: len(overrides[f]))
    model: dict[str, Any] = {"name": name, "flavor": flavor}
    if overrides[flavor]:
        model["overrides"] = {}
    for key, value in overrides[flavor].items():
        *outer, leaf = key.split(".")
        table = model["overrides"]
        for part in outer:
            table = table.setdefault(part, {})
        table[leaf] = value
    return tomli_w.dumps({"model": model} | ({"mtp": {"num_layers": mtp_layers}} if mtp_layers else {}))


def _flat(args: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(args):
        value, key = getattr(args, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            flat |= _flat(value, key + ".")
        elif key not in _NOT_THE_MODEL:
            flat[key] = value
    if "moe_args.num_experts" in flat and not flat.get("moe_enabled", True):
        flat = {key: value for key, value in flat.items() if not key.startswith("moe_")} | {"moe_enabled": False}
    return flat


def args_from_toml(path: Path) -> tuple[str, Any]:
    """Name and arguments of the model of a run's configuration; what it says of the run itself is not looked at."""
    try:
        table = tomllib.loads(path.read_text())
        name, flavor = (table["model"][key] for key in ("name", "flavor"))
    except OSError as error:
        raise InterchangeError(f"{path}: cannot be read ({error.strerror}); give the TOML file of a run") from error
    except ValueError as error:
        raise InterchangeError(f"{path}: not valid TOML: {error}") from error
    except KeyError as error:
        raise InterchangeError(f"{path}: has no model.{error}; give the TOML file of a run") from error
    # The byte tokenizer needs no files.
    argv = [f"--model.name={name}", f"--model.flavor={flavor}", "--training.tokenizer=byte"]
    argv += [f"--model.overrides.{key}={show(value)}" for key, value in _leaves(table["model"].get("overrides", {}))]
    if (seq_len := table.get("training", {}).get("seq_len")) is not None:
        argv.append(f"--training.seq_len={seq_len}")
    try:
        return name, build_model_args(load_config(argv, world_size=1))
    except ConfigError as error:
        raise InterchangeError(f"{path}: {error}") from error


def _leaves(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for key, value in table.items():
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return leaves
