"""The arguments of the model: a flavor of torchtitan's, changed by `[model.overrides]`."""

import copy
import dataclasses
import importlib
from typing import Any, get_type_hints

from moe_titan.config.errors import ConfigError, did_you_mean, nearest_or_all, one_of
from moe_titan.config.sections import OVERRIDES, Config
from moe_titan.config.values import check

# Model name -> where torchtitan keeps its flavors.
_FLAVORS = {
    "llama3": ("torchtitan.models.llama3", "llama3_args"),
    "qwen3": ("torchtitan.models.qwen3", "qwen3_args"),
    "deepseek_v3": ("torchtitan.models.deepseek_v3", "deepseekv3_args"),
}
# Arguments that a key of the configuration decides.
_SET_BY_KEY = {
    "max_seq_len": "training.seq_len",
    "moe_args._debug_force_load_balance": "debug.moe_force_load_balance",
    "expert_parallel_comm_backend": "moe.dispatcher",
}
_MAY_BE_ZERO = {"eos_id", "n_dense_layers", "q_lora_rank", "num_shared_experts"}


def build_model_args(config: Config) -> Any:
    """Arguments of the configured flavor as torchtitan's dataclass (a copy), with the overrides applied.

    `max_seq_len` is `training.seq_len`. `use_grouped_mm` stays as the flavor has it, whatever the machine.

    Raises:
        ConfigError: unknown flavor, unknown argument, or a value of the wrong type or range.
    """
    module, name = _FLAVORS[config.model.name]
    flavors = getattr(importlib.import_module(module), name)
    if config.model.flavor not in flavors:
        what = f"must be {one_of(flavors)} for {config.model.name}{did_you_mean(config.model.flavor, flavors)}"
        raise ConfigError(config.problem("model.flavor", what))
    args = copy.deepcopy(flavors[config.model.flavor])
    if problems := [problem for name in config.model.overrides if (problem := _override(args, name, config))]:
        raise ConfigError("\n".join(problems))

    # torchtitan warns of, and works around, two things that do not concern us: a longer sequence than the flavor's, and
    # a GPU without its grouped GEMM.
    args.max_seq_len = config.training.seq_len
    moe_args = getattr(args, "moe_args", None)
    use_grouped_mm = moe_args and moe_args.use_grouped_mm
    if moe_args:
        moe_args.use_grouped_mm = False
    args.update_from_config(config)
    if moe_args:
        moe_args.use_grouped_mm = use_grouped_mm
    return args


def _override(args: Any, name: str, config: Config) -> str | None:
    """Set one argument, dots leading into nested ones. Returns what is wrong, if anything is."""
    key = f"{OVERRIDES}.{name}"
    if name in _SET_BY_KEY:
        return config.problem(key, f"set {_SET_BY_KEY[name]} instead")
    *outer, leaf = name.split(".")
    holder = args
    for part in [*outer, leaf]:
        kinds = get_type_hints(type(holder)) if dataclasses.is_dataclass(holder) else {}
        if part not in kinds:
            known = [kind for kind in kinds if not kind.startswith("_")]
            return config.problem(key, f"the model has no argument {name}{nearest_or_all(part, known) if known else ''}")
        target, holder = holder, getattr(holder, part)
    if dataclasses.is_dataclass(holder):
        return config.problem(key, f"is a table; write [{key}] with arguments below it")
    value = config.get(key)
    try:
        value = check(value, kinds[leaf])
    except ValueError as error:
        return config.problem(key, str(error))
    low = 0 if leaf in _MAY_BE_ZERO else 1
    if type(value) is int and value < low:
        return config.problem(key, f"must be >= {low}")
    if type(value) is float and value <= 0:
        return config.problem(key, "must be > 0")
    setattr(target, leaf, value)
    return None
