"""Conditions between keys: the layout against the processes and the model, and settings that exclude each other."""

from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

import torch

from moe_titan.config.errors import ConfigError, did_you_mean, one_of, show
from moe_titan.config.low_precision import check_low_precision
from moe_titan.config.sections import OVERRIDES, Config, Mtp

_REPLICATE = "parallelism.data_parallel_replicate_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_TP = "parallelism.tensor_parallel_degree"
_CP = "parallelism.context_parallel_degree"
_PP = "parallelism.pipeline_parallel_degree"
_EP = "parallelism.expert_parallel_degree"
_ETP = "parallelism.expert_tensor_parallel_degree"

# Dispatchers that are not ours: the module that only their package has, and where that is.
_PACKAGES = {
    "deepep": ("deep_ep", "github.com/deepseek-ai/DeepEP"),
    "hybridep": ("hybrid_ep_cpp", "the branch hybrid-ep of github.com/deepseek-ai/DeepEP"),
}

# torchtitan's deepseek_v3 has no varlen attention.
_ATTENTION = {
    "llama3": ("sdpa", "flex", "varlen"),
    "qwen3": ("sdpa", "flex", "varlen"),
    "deepseek_v3": ("sdpa", "flex"),
}


def resolve(config: Config, world_size: int) -> None:
    """Replace -1 in `data_parallel_shard_degree` and `global_batch_size`, and shorten a default warmup to a short run.

    Raises:
        ConfigError: the degrees do not fit the number of processes.
    """
    parallelism, training, schedule = config.parallelism, config.training, config.lr_scheduler
    left = world_size
    for name in (_PP, _CP, _TP, _REPLICATE):
        if left % config.get(name):
            raise ConfigError(
                config.problem(name, f"must divide {left}, what is left of {world_size} processes; {_divisors(left)}")
            )
        left //= config.get(name)
    if parallelism.data_parallel_shard_degree not in (-1, left):
        processes = world_size // left * parallelism.data_parallel_shard_degree
        cure = f"must be -1 or {left} for {world_size} processes; change it, or start {processes} processes"
        raise ConfigError(config.problem(_SHARD, cure))
    parallelism.data_parallel_shard_degree = left
    if training.global_batch_size == -1:
        training.global_batch_size = training.local_batch_size * _dp_degree(config)
    if "lr_scheduler.warmup_steps" not in config.sources:
        schedule.warmup_steps = min(schedule.warmup_steps, _total_steps(config) - _decay_steps(config))


def validate(config: Config, model_args: Any, world_size: int) -> list[str]:
    """Check a resolved configuration against its model and the number of processes.

    Args:
        model_args: what `build_model_args(config)` returns.

    Returns:
        One line per problem; none when the run can start.
    """
    experts = _check_experts if is_moe(model_args) else _check_dense
    return [
        *_check_model(config, model_args),
        *_check_tensor_parallel(config, model_args, world_size),
        *experts(config, model_args, world_size),
        *_check_prediction(config),
        *_check_steps(config),
        *_check_data(config),
        *_check_run(config),
        *check_low_precision(config),
    ]


def is_moe(model_args: Any) -> bool:
    """Whether any layer of the model has experts."""
    if hasattr(model_args, "n_dense_layers"):
        return model_args.n_layers > model_args.n_dense_layers
    return getattr(model_args, "moe_enabled", False)


def _check_model(config: Config, args: Any) -> Iterator[str]:
    attention = _ATTENTION[config.model.name]
    if args.attn_type not in attention:
        yield _argument(config, args, "attn_type", _choice(args.attn_type, attention, f" for {config.model.name}"))
    elif args.attn_type == "varlen" and not torch.cuda.is_available():
        yield _argument(config, args, "attn_type", 'needs a GPU; use "sdpa" or "flex"')
    masks = {"sdpa": ("causal",), "varlen": ("block_causal",)}.get(args.attn_type, ("causal", "block_causal"))
    if args.attn_mask_type not in masks:
        with_type = f" with attn_type = {show(args.attn_type)}"
        yield _argument(config, args, "attn_mask_type", _choice(args.attn_mask_type, masks, with_type))
    if args.n_heads % (getattr(args, "n_kv_heads", None) or args.n_heads):
        yield _argument(config, args, "n_kv_heads", f"must divide n_heads = {args.n_heads}; {_divisors(args.n_heads)}")
    if config.model.name == "llama3" and args.dim % (2 * args.n_heads):
        yield _argument(config, args, "n_heads", f"must divide dim = {args.dim} into heads of an even size")
    for name in ("head_dim", "qk_rope_head_dim"):
        if getattr(args, name, 0) % 2:
            yield _argument(config, args, name, "must be even: rotary embeddings turn pairs")


def _check_tensor_parallel(config: Config, args: Any, world_size: int) -> Iterator[str]:
    sizes = {
        "training.seq_len": config.training.seq_len // config.parallelism.context_parallel_degree,
        "n_heads": args.n_heads,
        "dim": args.dim,
        "vocab_size": args.vocab_size,
        **_feed_forward_sizes(args),
    }
    if getattr(args, "n_kv_heads", None):
        sizes["n_kv_heads"] = args.n_kv_heads
    for name, size in sizes.items():
        yield from _must_divide(config, _TP, name, size, world_size)


def _feed_forward_sizes(args: Any) -> dict[str, int]:
    """Hidden sizes of the layers without experts, and of the shared experts."""
    if hasattr(args, "multiple_of"):
        hidden = int((args.ffn_dim_multiplier or 1) * int(2 * 4 * args.dim / 3))
        return {"hidden size of the feed-forward layers": -(-hidden // args.multiple_of) * args.multiple_of}
    sizes = {}
    if is_moe(args) and args.moe_args.num_shared_experts:
        sizes["moe_inter_dim x num_shared_experts"] = args.moe_inter_dim * args.moe_args.num_shared_experts
    if getattr(args, "n_dense_layers", 0):
        sizes["inter_dim"] = args.inter_dim
    elif not is_moe(args):
        sizes["hidden_dim"] = args.hidden_dim
    return sizes


def _check_dense(config: Config, args: Any, world_size: int) -> Iterator[str]:
    switches = {
        _EP: 1,
        _ETP: 1,
        "moe.sequence_balance_loss_coeff": 0,
        "moe.batch_balance_loss_coeff": 0,
        "moe.rebalance_interval": 0,
        "moe.capacity_factor": None,
        "moe.stash_factor": None,
        "moe.dispatch_domain": None,
        "debug.moe_force_load_balance": False,
    }
    for name, off in switches.items():
        if config.get(name) != off:
            model = f"{config.model.name} {config.model.flavor}"
            yield config.problem(name, f"must be {show(off)}: {model} has no experts; choose an MoE flavor")


def _check_experts(config: Config, args: Any, world_size: int) -> Iterator[str]:
    moe = args.moe_args
    stage = world_size // config.parallelism.pipeline_parallel_degree
    yield from _must_divide(config, _EP, "moe_args.num_experts", moe.num_experts, world_size)
    yield from _must_divide(config, _ETP, "moe_inter_dim", args.moe_inter_dim, world_size)
    ep, etp = config.get(_EP), config.get(_ETP)
    if stage % (ep * etp):
        yield config.problem(_EP, f"times {_ETP} {etp} must divide {stage} processes; as product {_divisors(stage)}")
    yield from _check_dispatcher(config, ep, etp)
    if moe.top_k > moe.num_experts:
        yield _argument(config, args, "moe_args.top_k", f"must be <= num_experts = {moe.num_experts}")
    if moe.score_before_experts:
        yield _argument(config, args, "moe_args.score_before_experts", "only false is supported")
    yield from _check_groups(config, args)


def _check_dispatcher(config: Config, ep: int, etp: int) -> Iterator[str]:
    kind = config.moe.dispatcher
    if kind == "local" and ep * etp > 1:
        yield config.problem("moe.dispatcher", f'needs {_EP} and {_ETP} 1; use "auto", "allgather" or "alltoall"')
    if kind in ("nvlink", *_PACKAGES) and ep * etp == 1:
        yield config.problem("moe.dispatcher", f'needs {_EP} or {_ETP} above 1; use "auto" or "local"')
    for name in ("moe.capacity_factor", "moe.stash_factor"):
        if config.get(name) is not None and kind not in ("auto", "nvlink"):
            yield config.problem(name, 'must be none: it is for moe.dispatcher = "nvlink"')
    if config.moe.stash_factor is not None and config.activation_checkpoint.mode != "none":
        yield config.problem(
            "moe.stash_factor", 'must be none: with activation_checkpoint.mode other than "none" experts keep no rows'
        )
    yield from _check_domain(config, ep, etp)
    if kind in _PACKAGES:
        yield from _check_package(config, etp)


def _check_domain(config: Config, ep: int, etp: int) -> Iterator[str]:
    domain, name = config.moe.dispatch_domain, "moe.dispatch_domain"
    if domain is None:
        return
    if config.moe.dispatcher not in ("auto", "alltoall", "nvlink"):
        kind = show(config.moe.dispatcher)
        yield config.problem(name, f"must be none with moe.dispatcher = {kind}; it is for alltoall and nvlink")
    sizes = [n for n in range(1, ep * etp + 1) if ep * etp % n == 0 and (n % etp == 0 or etp % n == 0)]
    if domain not in sizes:
        what = f"must divide {ep * etp} = {_EP} {ep} x {_ETP} {etp}, and divide or be a multiple of the latter"
        yield config.problem(name, f"{what}; use {one_of(sizes)}")


def _check_package(config: Config, etp: int) -> Iterator[str]:
    kind = config.moe.dispatcher
    module, source = _PACKAGES[kind]
    if find_spec(module) is None:
        what = f"needs the Python module {module}, which is not installed: build it from {source}"
        yield config.problem("moe.dispatcher", f'{what}, or use "auto"')
    if not torch.cuda.is_available():
        yield config.problem("moe.dispatcher", 'needs a GPU; use "auto"')
    if etp > 1:
        yield config.problem(_ETP, f'must be 1 with moe.dispatcher = {show(kind)}; use "auto" to split experts')
    if config.training.mixed_precision_param != "bfloat16":
        yield config.problem("training.mixed_precision_param", f'must be "bfloat16" with moe.dispatcher = {show(kind)}')
    if kind == "deepep" and (config.moe.dispatch_sms or 0) % 2:
        yield config.problem("moe.dispatch_sms", 'must be even with moe.dispatcher = "deepep"')


def _check_groups(config: Config, args: Any) -> Iterator[str]:
    moe = args.moe_args
    groups, limited = moe.num_expert_groups, moe.num_limited_groups
    if groups is None:
        if limited is not None:
            yield _argument(config, args, "moe_args.num_limited_groups", "needs moe_args.num_expert_groups")
        return
    if moe.num_experts % groups or moe.num_experts // groups < 2:
        what = f"must divide num_experts = {moe.num_experts} into groups of at least 2"
        yield _argument(config, args, "moe_args.num_expert_groups", f"{what}; {_divisors(moe.num_experts, 2)}")
    elif limited is None or limited > groups:
        what = f"must be set, from 1 to num_expert_groups = {groups}"
        yield _argument(config, args, "moe_args.num_limited_groups", what)
    elif limited * (moe.num_experts // groups) < moe.top_k:
        what = f"leaves {limited * (moe.num_experts // groups)} experts to choose from, fewer than top_k = {moe.top_k}"
        yield _argument(config, args, "moe_args.num_limited_groups", f"{what}; raise it")


def _check_prediction(config: Config) -> Iterator[str]:
    mtp = config.mtp
    if mtp.num_layers >= config.training.seq_len:
        what = f"must be < training.seq_len = {config.training.seq_len}, or no sample has a token so much further on"
        yield config.problem("mtp.num_layers", f"{what}; lower it")
    if not mtp.num_layers and mtp.loss_scaling_factor != Mtp().loss_scaling_factor:
        yield config.problem("mtp.loss_scaling_factor", "needs mtp.num_layers >= 1")


def _check_steps(config: Config) -> Iterator[str]:
    training, schedule = config.training, config.lr_scheduler
    unit = training.local_batch_size * _dp_degree(config)
    if training.global_batch_size % unit:
        what = f"must be a multiple of local_batch_size {training.local_batch_size} x data-parallel {_dp_degree(config)}"
        nearest = max(round(training.global_batch_size / unit), 1) * unit
        yield config.problem("training.global_batch_size", f"{what} = {unit}; use -1 or e.g. {nearest}")
    total, decay = _total_steps(config), _decay_steps(config)
    if schedule.warmup_steps + decay > total:
        what = f"with {decay} decay steps does not fit into {total} steps; use at most {total - decay}"
        cure = f"{what}, or keep a longer run's schedule with lr_scheduler.total_steps"
        yield config.problem("lr_scheduler.warmup_steps", cure)
    if total < training.steps and schedule.min_lr_factor == 0:
        what = f"the learning rate would be 0 from there to training.steps = {training.steps}"
        yield config.problem("lr_scheduler.total_steps", f"{what}; raise it, or set lr_scheduler.min_lr_factor")


def _check_data(config: Config) -> Iterator[str]:
    training = config.training
    if training.dataset in ("text", "json", "parquet") and not (training.dataset_path and Path(training.dataset_path).exists()):
        what = f"must be an existing file or folder for dataset {show(training.dataset)}, seen from {Path.cwd()}"
        yield config.problem("training.dataset_path", what)
    folder = Path(config.model.hf_assets_path)
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if training.tokenizer != "byte" and missing:
        what = f"must be a folder with {' and '.join(missing)}, seen from {Path.cwd()}"
        yield config.problem("model.hf_assets_path", f'{what}; or set training.tokenizer = "byte"')
    loader = training.dataloader
    for name, off in (("persistent_workers", False), ("prefetch_factor", None)):
        if getattr(loader, name) != off and loader.num_workers == 0:
            yield config.problem(f"training.dataloader.{name}", "needs training.dataloader.num_workers > 0")


def _check_run(config: Config) -> Iterator[str]:
    profiling, checkpoint = config.profiling, config.checkpoint
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        yield config.problem("profiling.profile_freq", f"must be >= profiler_warmup + profiler_active = {cycle}")
    if config.training.dtype == "bfloat16" and config.training.mixed_precision_param == "float32":
        what = 'must be "bfloat16" with training.dtype = "bfloat16"; for fp32 compute set training.dtype = "float32"'
        yield config.problem("training.mixed_precision_param", what)
    if config.compile.enable:
        # Asked only when it matters, since the compiler is slow to import.
        backends = torch._dynamo.list_backends(exclude_tags=())
        if config.compile.backend not in backends:
            yield config.problem("compile.backend", f"must be {one_of(sorted(backends))}")
    if checkpoint.create_seed_checkpoint and (not checkpoint.enable or checkpoint.load_only):
        what = "needs checkpoint.enable = true and checkpoint.load_only = false"
        yield config.problem("checkpoint.create_seed_checkpoint", what)
    if checkpoint.initial_load_path is not None:
        if not checkpoint.enable:
            yield config.problem("checkpoint.initial_load_path", "needs checkpoint.enable = true")
        elif not Path(checkpoint.initial_load_path).is_dir():
            what = f"must be an existing checkpoint folder, seen from {Path.cwd()}"
            yield config.problem("checkpoint.initial_load_path", what)


def _must_divide(config: Config, name: str, what: str, size: int, world_size: int) -> Iterator[str]:
    if size % config.get(name):
        yield config.problem(name, f"must divide {what} = {size}; {_divisors(gcd(size, world_size))}")


def _argument(config: Config, args: Any, name: str, what: str) -> str:
    """A problem with a model argument, which came from an override or from the flavor."""
    if name in config.model.overrides:
        return config.problem(f"{OVERRIDES}.{name}", what)
    value = args
    for part in name.split("."):
        value = getattr(value, part)
    return config.problem("model.flavor", f"{name} = {show(value)}: {what}")


def _choice(value: str, choices: tuple[str, ...], with_what: str) -> str:
    return f"must be {one_of(choices)}{with_what}{did_you_mean(value, choices)}"


def _divisors(size: int, largest_share: int = 1) -> str:
    """The divisors of `size`, as a cure."""
    divisors = [n for n in range(1, size // largest_share + 1) if size % n == 0]
    return f"use {'one of ' if len(divisors) > 1 else ''}{', '.join(map(str, divisors))}"


def _dp_degree(config: Config) -> int:
    return config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree


def _total_steps(config: Config) -> int:
    return config.lr_scheduler.total_steps or config.training.steps


def _decay_steps(config: Config) -> int:
    return round(_total_steps(config) * (config.lr_scheduler.decay_ratio or 0))
