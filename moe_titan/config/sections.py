"""The sections and keys that configure a run. Names and defaults are those of torchtitan 0.2.2 where it has the key."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from moe_titan.config.errors import show
from moe_titan.config.values import NOT_EMPTY, POSITIVE, Rule, at_least, between, subset_of

BUILT_IN_DATASETS = ("stdlib", "text", "json", "parquet", "c4", "c4_test", "c4_validation")
OVERRIDES = "model.overrides"

SECONDS = between(1, 10**8)
_UNSPLIT = Rule("1: this kind of parallelism is not supported yet", lambda degree: degree == 1)
_MINUS_1_OR_POSITIVE = Rule("-1 or >= 1", lambda value: value == -1 or value >= 1)


def key(default: Any, doc: str, rule: Rule | None = None) -> Any:
    """A configuration key: its default, its line in `--help`, and a condition beyond its type."""
    value = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**value, metadata={"doc": doc, "rule": rule})


@dataclass
class Job:
    config_file: str | None = key(None, "TOML file to read; --config is the same")
    dump_folder: str = key("./outputs", "Folder for everything that the run writes", NOT_EMPTY)
    description: str = key("default job", "What this run is for; shown in the log")
    print_config: bool = key(False, "Print the resolved configuration at the start")


@dataclass
class Profiling:
    enable_profiling: bool = key(False, "Record traces with torch.profiler")
    save_traces_folder: str = key("profile_traces", "Folder of the traces, inside job.dump_folder", NOT_EMPTY)
    profile_freq: int = key(10, "Steps from one trace to the next", at_least(1))
    profiler_active: int = key(1, "Steps that a trace records", at_least(1))
    profiler_warmup: int = key(3, "Steps that the profiler runs before it records", at_least(0))


@dataclass
class Metrics:
    log_freq: int = key(10, "Steps from one logged step to the next", at_least(1))
    enable_tensorboard: bool = key(False, "Write metrics for TensorBoard")
    disable_color_printing: bool = key(False, "Draw the progress bar without colour")
    save_tb_folder: str = key("tb", "Folder of the TensorBoard files, inside job.dump_folder", NOT_EMPTY)
    progress_bar: bool = key(True, "Show a progress bar with the time left")


@dataclass
class Model:
    name: Literal["llama3", "qwen3", "deepseek_v3"] = key("llama3", "Model architecture")
    flavor: str = key("debugmodel", "Named size of the architecture, e.g. 30B-A3B")
    hf_assets_path: str = key("./tests/assets/tokenizer", "Folder with tokenizer.json")
    # Model argument -> value, nested names joined by dots; checked against the flavor's arguments.
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class Optimizer:
    name: Literal["AdamW"] = key("AdamW", "Optimizer")
    lr: float = key(8e-4, "Peak learning rate", POSITIVE)
    beta1: float = key(0.9, "Decay of the first moment", between(0, 1, high_included=False))
    beta2: float = key(0.95, "Decay of the second moment", between(0, 1, high_included=False))
    eps: float = key(1e-8, "Added to the root of the second moment", POSITIVE)
    weight_decay: float = key(0.1, "Decoupled weight decay", at_least(0))
    implementation: Literal["for-loop", "foreach", "fused"] = key("fused", "Kernel of the update")


@dataclass
class LRScheduler:
    warmup_steps: int = key(200, "Steps of linear warmup; the default is shortened to fit a short run", at_least(0))
    total_steps: int | None = key(None, "Steps that the schedule spans; none means training.steps", at_least(1))
    decay_ratio: float | None = key(
        None, "Share of the steps spent decaying, at the end; none decays right after the warmup", between(0, 1)
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "Shape of the decay")
    min_lr_factor: float = key(0.0, "Learning rate at the end of the decay, as a share of optimizer.lr", between(0, 1))


@dataclass
class DataLoader:
    num_workers: int = key(0, "Above 0, a process reads batches ahead; 0 reads them when they are wanted", at_least(0))
    persistent_workers: bool = key(False, "Accepted for torchtitan's sake: the process lives as long as the run")
    pin_memory: bool = key(False, "Put batches into pinned memory")
    prefetch_factor: int | None = key(None, "Steps to read ahead, needs num_workers > 0; none means 2", at_least(1))


@dataclass
class Training:
    dataset: str = key(
        "c4_test",
        f"One of {', '.join(BUILT_IN_DATASETS)}, or OWNER/NAME of a Hugging Face dataset",
        Rule(
            f"one of {', '.join(BUILT_IN_DATASETS)}, or OWNER/NAME of a Hugging Face dataset",
            lambda name: name in BUILT_IN_DATASETS or "/" in name.strip("/"),
        ),
    )
    dataset_path: str | None = key(None, "Local file or folder to read the dataset from")
    dataset_config: str | None = key(None, "Configuration name of a Hugging Face dataset")
    dataset_split: str = key("train", "Split of a Hugging Face dataset", NOT_EMPTY)
    text_key: str = key("text", "Field of a record that holds the text", NOT_EMPTY)
    tokenizer: Literal["auto", "byte", "huggingface"] = key(
        "auto", "byte needs no file; huggingface (auto means the same) reads model.hf_assets_path"
    )
    local_batch_size: int = key(8, "Sequences that a data-parallel rank takes at once", at_least(1))
    global_batch_size: int = key(
        -1, "Sequences in an optimizer step; -1 means local_batch_size x data-parallel degree", _MINUS_1_OR_POSITIVE
    )
    seq_len: int = key(2048, "Tokens in a sequence", at_least(1))
    max_norm: float = key(1.0, "Gradients are clipped to this norm", POSITIVE)
    steps: int = key(10000, "Optimizer steps to train for", at_least(1))
    dtype: Literal["bfloat16", "float32"] = key("float32", "Type of the stored parameters and optimizer state")
    mixed_precision_param: Literal["bfloat16", "float32"] = key("bfloat16", "Type to compute in")
    mixed_precision_reduce: Literal["float32"] = key("float32", "Type to reduce gradients in")
    gc_freq: int = key(50, "Steps from one Python garbage collection to the next", at_least(1))
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = key(1, "Ranks that the model is replicated over", at_least(1))
    data_parallel_shard_degree: int = key(
        -1, "Ranks that parameters are sharded over (FSDP); -1 takes all that are left", _MINUS_1_OR_POSITIVE
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "Whether FSDP frees gathered parameters after forward"
    )
    tensor_parallel_degree: int = key(1, "Ranks that attention and dense layers are split over", at_least(1))
    pipeline_parallel_degree: int = key(1, "Pipeline stages; only 1 is supported", _UNSPLIT)
    context_parallel_degree: int = key(1, "Ranks that a sequence is split over; only 1 is supported", _UNSPLIT)
    expert_parallel_degree: int = key(1, "Ranks that the experts are spread over", at_least(1))
    expert_tensor_parallel_degree: int = key(1, "Ranks that each expert is split over", at_least(1))
    expert_parallel_comm_backend: Literal["standard"] = key(
        "standard", "torchtitan's choice of dispatch; moe.dispatcher takes its place"
    )


@dataclass
class Moe:
    dispatcher: Literal["auto", "local", "allgather", "alltoall", "nvlink", "deepep", "hybridep"] = key(
        "auto",
        "How tokens reach their experts; local is for experts that are not spread over ranks, nvlink for ranks of one host",
    )
    dispatch_sms: int | None = key(
        None, "Multiprocessors for a transfer of nvlink, deepep or hybridep; none for what each is fastest with", at_least(1)
    )
    dispatch_domain: int | None = key(
        None,
        "Consecutive ranks near each other, outside of which alltoall and nvlink send a token once to each such domain; none for "
        "those of a host",
        at_least(1),
    )
    capacity_factor: float | None = key(
        None, "Rows a rank has room for with nvlink, as a multiple of its even share; none for all that can arrive", POSITIVE
    )
    stash_factor: float | None = key(
        None,
        "Rows that the experts of all layers keep for backward with nvlink, as a multiple of the even share; none: each its room",
        POSITIVE,
    )
    rebalance_interval: int = key(
        0,
        "Steps after which, as after the first, experts move between ranks so that all get as many rows; 0 for never",
        at_least(0),
    )
    sequence_balance_loss_coeff: float = key(0.0, "Weight of the balance loss over each sequence", at_least(0))
    batch_balance_loss_coeff: float = key(0.0, "Weight of the balance loss over the batch", at_least(0))


@dataclass
class Mtp:
    num_layers: int = key(0, "Tokens to predict beyond the next, each with a block of its own; 0: none", at_least(0))
    loss_scaling_factor: float = key(0.3, "Weight of the mean loss on those tokens beside the loss on the next", POSITIVE)


_RECIPE = Literal["none", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass
class Float8:
    recipe: _RECIPE = key("none", "Low-precision recipe of linear layers outside of routed experts")
    expert_recipe: _RECIPE = key("none", "Low-precision recipe of routed experts")
    filter_fqns: list[str] = key([], "Modules whose name contains one of these are not converted")
    first_layers_bf16: int = key(0, "Layers at the start that are not converted", at_least(0))
    last_layers_bf16: int = key(0, "Layers at the end that are not converted", at_least(0))
    expert_weight_grad_bf16: bool = key(False, "Leave the experts' weight gradients out of expert_recipe")
    backend: Literal["native", "te"] = key("native", "torchao and moe_titan's kernels, or Transformer Engine")
    all_gather: bool = key(False, "FSDP2 gathers weights in FP8: of tensorwise linear layers and of blockwise experts")
    emulate: bool = key(False, "Compute the recipes' numbers slowly on any machine, without low-precision hardware")
    keep_weights: bool = key(
        False, "Quantise experts' weights once a step for all that use them, and keep them both ways: two bytes a parameter"
    )
    save_activations: bool = key(
        False, "Save the experts' pre-activations for backward in FP8, as expert_recipe rowwise or blockwise quantises them"
    )
    head: bool = key(
        False, "Compute the head's logits and the gradient of its input in recipe, too; if rowwise, its weight's as well"
    )
    dispatch: bool = key(False, "Send tokens to routed experts in FP8, as expert_recipe rowwise or blockwise quantises them")


@dataclass
class Checkpoint:
    enable: bool = key(False, "Save checkpoints, and resume from the newest one")
    folder: str = key("checkpoint", "Folder of the checkpoints, inside job.dump_folder", NOT_EMPTY)
    interval: int = key(500, "Steps from one checkpoint to the next", at_least(1))
    interval_minutes: float = key(0.0, "Minutes from one checkpoint to the next, if sooner; 0: steps alone count", at_least(0))
    initial_load_path: str | None = key(None, "Checkpoint to start from while checkpoint.folder is empty")
    initial_load_model_only: bool = key(True, "Take only the model from initial_load_path")
    last_save_model_only: bool = key(True, "Save only the model at the end of training")
    export_dtype: Literal["float16", "bfloat16", "float32"] = key("float32", "Type of a model-only save")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled",
        "Save while training goes on, from a copy in host memory; with pinned memory faster, and it is kept from save to save",
    )
    keep_latest_k: int = key(
        10,
        "Checkpoints to keep, at least 2; 0 keeps all",
        Rule("0 (keep all) or >= 2 (the newest may be incomplete)", lambda k: k == 0 or k >= 2),
    )
    keep_every: int = key(0, "Keep besides all checkpoints of steps divisible by this; 0: none", at_least(0))
    checksums: bool = key(True, "Record a checksum of every file, and compare it before loading")
    dialect: Literal["0.2.2", "0.3.0"] = key("0.2.2", "torchtitan release whose keys are written; either is read")
    load_step: int = key(-1, "Step to resume from; -1 means the newest", at_least(-1))
    exclude_from_loading: list[str] = key(
        [],
        "Parts of the state to start afresh: optimizer, lr_scheduler, dataloader, train_state",
        subset_of("optimizer", "lr_scheduler", "dataloader", "train_state"),
    )
    enable_first_step_checkpoint: bool = key(False, "Save a checkpoint after the first step too")
    create_seed_checkpoint: bool = key(False, "Save the initial model as step 0 and end")
    load_only: bool = key(False, "Load checkpoints but save none")


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = key("selective", "What is recomputed in backward")
    selective_ac_option: str = key(
        "2",
        "Mode selective: op recomputes by operator, N recomputes every Nth layer",
        Rule('"op" or a positive integer in quotes', lambda text: text == "op" or text.isdecimal() and int(text) > 0),
    )


@dataclass
class Compile:
    enable: bool = key(False, "Compile with torch.compile")
    components: list[str] = key(
        ["model", "loss"], "Parts to compile: model; loss is accepted and needs no compiling", subset_of("model", "loss")
    )
    backend: str = key("inductor", "Backend of torch.compile", NOT_EMPTY)


@dataclass
class Comm:
    mode: Literal["default"] = key("default", "Kind of communication; only default is supported")
    init_timeout_seconds: int = key(300, "How long a rank waits for another, up to the end of the first step", SECONDS)
    train_timeout_seconds: int = key(100, "How long a rank waits for another after the first step", SECONDS)


@dataclass
class Debug:
    seed: int = key(0, "Seed of the initial weights and of the data order", between(0, 2**63 - 1))
    deterministic: bool = key(False, "Use deterministic algorithms; an op without one is an error")
    deterministic_warn_only: bool = key(False, "With deterministic: an op without such an algorithm only warns")
    moe_force_load_balance: bool = key(False, "Route tokens to experts in turn, whatever the router says")


@dataclass
class Config:
    """The configuration of a run. Attributes are named as in the TOML file: `config.training.seq_len`."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    moe: Moe = field(default_factory=Moe)
    mtp: Mtp = field(default_factory=Mtp)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    # Where each key was set: a file name or "command line". Not part of the configuration itself.
    sources: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def get(self, name: str) -> Any:
        """Value of a dotted key, e.g. `training.seq_len` or `model.overrides.n_layers`."""
        if name.startswith(OVERRIDES + "."):
            return self.model.overrides[name.removeprefix(OVERRIDES + ".")]
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def set(self, name: str, value: Any, source: str) -> None:
        """Set a dotted key and remember where its value came from."""
        self.sources[name] = source
        if name.startswith(OVERRIDES + "."):
            self.model.overrides[name.removeprefix(OVERRIDES + ".")] = value
        else:
            section, _, leaf = name.rpartition(".")
            setattr(self.get(section), leaf, value)

    def problem(self, name: str, what: str) -> str:
        """One line of a ConfigError: where the key was set, its value, and `what` is wrong with it."""
        return f"{self.sources.get(name, 'default')}: {name} = {show(self.get(name))}: {what}"


@dataclass(frozen=True)
class Key:
    """What is known of one key."""

    kind: Any
    default: Any
    doc: str
    rule: Rule | None


def _keys_of(section: Any, prefix: str) -> dict[str, Key]:
    kinds = get_type_hints(type(section))
    keys: dict[str, Key] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            keys |= _keys_of(value, f"{prefix}{item.name}.")
        elif "doc" in item.metadata:
            keys[prefix + item.name] = Key(kinds[item.name], value, item.metadata["doc"], item.metadata["rule"])
    return keys


# Dotted name -> what is known of the key, for every key except the free table model.overrides.
KEYS = _keys_of(Config(), "")
