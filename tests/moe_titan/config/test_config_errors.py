"""Wrong configurations: each is refused with its source, key, value, what is allowed and the nearest valid name."""

import pytest

from moe_titan.config import ConfigError, load_config

MOE = {"model.name": "qwen3", "model.flavor": "debugmodel_moe", "training.tokenizer": "byte"}
DEEPSEEK = MOE | {"model.name": "deepseek_v3", "model.flavor": "debugmodel"}
LLAMA = MOE | {"model.name": "llama3", "model.flavor": "debugmodel"}
QWEN_DENSE = MOE | {"model.flavor": "debugmodel"}


def flags(base: dict[str, str], text: str) -> list[str]:
    return [*(f"--{key}={value}" for key, value in base.items()), *text.split()]


def message(argv: list[str], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size)
    return str(caught.value)


# (TOML text, what the message must hold besides the file's name)
TOMLS = [
    ("[training]\nstep = 5", ["training.step = 5", "unknown key", "did you mean steps?"]),
    ("[training]\nlr = 0.1", ["training.lr = 0.1", "unknown key in [training]", "did you mean optimizer.lr?"]),
    ("[optimiser]\nlr = 0.1", ["optimiser.lr = 0.1", "unknown section [optimiser]", "did you mean optimizer?"]),
    ("[paralelism]", ["paralelism = {}", "did you mean parallelism?"]),
    ("training = 5", ["training = 5", "is a section", "[training]"]),
    ("seq_len = 5", ["seq_len = 5", "unknown key", "did you mean training.seq_len?"]),
    ("[training.seq_len]\nx = 1", ["training.seq_len.x = 1", "unknown section [training.seq_len]"]),
    ('[training]\nsteps = "10"', ['training.steps = "10"', "must be an integer"]),
    ("[training]\nsteps = true", ["training.steps = true", "must be an integer"]),
    ("[training]\nsteps = 1.5", ["training.steps = 1.5", "must be an integer"]),
    ("[training]\ndataset = 3", ["training.dataset = 3", "must be a string"]),
    ("[training]\nmax_norm = nan", ["training.max_norm = NaN", "must be a finite number"]),
    ("[optimizer]\nlr = inf", ["optimizer.lr = Infinity", "must be a finite number"]),
    ("[compile]\nenable = 1", ["compile.enable = 1", "must be true or false"]),
    ('[compile]\ncomponents = "model"', ['compile.components = "model"', "must be a list of strings", "a,b"]),
    ("[compile]\ncomponents = [1]", ["compile.components = [1]", "must be a list of strings"]),
    ('[compile]\ncomponents = ["optimizer"]', ['["optimizer"]', 'drawn from "model", "loss"']),
    ("[activation_checkpoint]\nselective_ac_option = 2", ["selective_ac_option = 2", "must be a string"]),
    ('[lr_scheduler]\ndecay_type = "cosin"', ['decay_type = "cosin"', '"linear", "sqrt", "cosine"', "mean cosine?"]),
    ('[model]\nname = "qwen"', ['model.name = "qwen"', '"deepseek_v3"', "did you mean qwen3?"]),
    ('[model]\nconverters = ["float8"]', ['model.converters = ["float8"]', "only [] is accepted", "float8.recipe"]),
    ('[model]\ntokenizer_path = "x"', ['model.tokenizer_path = "x"', "only none", "model.hf_assets_path"]),
    ("[metrics]\nenable_wandb = true", ["metrics.enable_wandb = true", "only false", "metrics.enable_tensorboard"]),
    ("[metrics]\nenable_wandb = 0", ["metrics.enable_wandb = 0", "only false is accepted"]),
    ("[fault_tolerance]\nenable = true", ["fault_tolerance.enable = true", "not supported", "checkpoint.enable"]),
    ("[validation]\nenable = true", ["validation.enable = true", "not supported"]),
    (
        "[quantize.linear.float9]\nemulate = true",
        ["unknown section [quantize.linear.float9]", "quantize.linear.float8?"],
    ),
    ("[training]\nsteps = = 3", ["not valid TOML", "line 2"]),
    ("[training]\nsteps = 3\nsteps = 4", ["not valid TOML"]),
]


@pytest.mark.parametrize(("text", "fragments"), TOMLS)
def test_wrong_toml(tmp_path, text, fragments):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    found = message(["--config", str(path)])
    for fragment in [str(path), *fragments]:
        assert fragment in found


# (flags every run of the case has, flags that are wrong, processes, what the message must hold)
COMMAND_LINES = [
    (MOE, "--training.stepz 5", 1, ["training.stepz", "did you mean steps?"]),
    (MOE, "--moe.dispatcher alltoal", 1, ['moe.dispatcher = "alltoal"', '"allgather"', "did you mean alltoall?"]),
    (MOE, "--parallelism.etp 2", 1, ["parallelism.etp", "unknown key in [parallelism]"]),
    (MOE, "--congif x.toml", 1, ["congif", "did you mean config?"]),
    (MOE, "train.toml", 1, ["train.toml", "expected --section.key value"]),
    (MOE, "--training.steps", 1, ["training.steps", "a value must follow"]),
    (MOE, "--training.steps ten", 1, ['training.steps = "ten"', "must be an integer"]),
    (MOE, "--optimizer.lr high", 1, ['optimizer.lr = "high"', "must be a finite number"]),
    (MOE, "--compile.enable true --compile.backend indctor", 1, ['compile.backend = "indctor"', "inductor"]),
    (MOE, "--debug.seed 99999999999999999999", 1, ["debug.seed = 99999999999999999999", "in [0, 9223372036854775807]"]),
    (MOE, "--comm.train_timeout_seconds 9999999999", 1, ["comm.train_timeout_seconds", "in [1, 100000000]"]),
    (MOE, "--compile.enable yes", 1, ['compile.enable = "yes"', "must be true or false"]),
    (MOE, "--training.steps 0", 1, ["training.steps = 0", "must be >= 1"]),
    (MOE, "--optimizer.lr 0", 1, ["optimizer.lr = 0", "must be > 0"]),
    (MOE, "--optimizer.beta2 1", 1, ["optimizer.beta2", "must be in [0, 1)"]),
    (MOE, "--lr_scheduler.decay_ratio 1.5", 1, ["lr_scheduler.decay_ratio", "must be in [0, 1]"]),
    (MOE, "--training.max_norm -1", 1, ["training.max_norm", "must be > 0"]),
    (
        MOE,
        "--training.dtype bfloat16 --training.mixed_precision_param float32",
        1,
        ['training.mixed_precision_param = "float32"', 'must be "bfloat16"', 'training.dtype = "float32"'],
    ),
    (MOE, "--metrics.log_freq 0", 1, ["metrics.log_freq", "must be >= 1"]),
    (MOE, "--checkpoint.keep_latest_k 1", 1, ["checkpoint.keep_latest_k", "0 (keep all) or >= 2"]),
    (MOE, "--checkpoint.async_mode sync", 1, ['checkpoint.async_mode = "sync"', '"disabled"', '"async"']),
    (MOE, "--checkpoint.create_seed_checkpoint", 1, ["checkpoint.create_seed_checkpoint", "checkpoint.enable = true"]),
    (MOE, "--checkpoint.last_save_in_hf", 1, ["checkpoint.last_save_in_hf", "only false is accepted", "DCP"]),
    (MOE, "--checkpoint.exclude_from_loading optimiser", 1, ["exclude_from_loading", '"optimizer", "lr_scheduler"']),
    (MOE, "--activation_checkpoint.mode memory_budget", 1, ['"memory_budget"', '"none", "selective", "full"']),
    (MOE, "--activation_checkpoint.selective_ac_option ops", 1, ['selective_ac_option = "ops"', '"op" or a positive']),
    (MOE, "--optimizer.name Adam", 1, ['optimizer.name = "Adam"', "did you mean AdamW?"]),
    (MOE, "--comm.mode fake_backend", 1, ['comm.mode = "fake_backend"', '"default"']),
    (MOE, "--moe.batch_balance_loss_coeff -0.1", 1, ["batch_balance_loss_coeff", "must be >= 0"]),
    (MOE, "--debug.seed -1", 1, ["debug.seed", "must be in [0,"]),
    (MOE, "--parallelism.pipeline_parallel_degree 2", 2, ["pipeline_parallel_degree", "must be 1", "not supported"]),
    (MOE, "--parallelism.context_parallel_degree 2", 2, ["context_parallel_degree", "must be 1", "not supported"]),
    (MOE, "--parallelism.expert_parallel_comm_backend deepep", 2, ['"deepep"', '"standard"']),
    (MOE, "--parallelism.enable_async_tensor_parallel", 1, ["enable_async_tensor_parallel", "only false is accepted"]),
    (MOE, "--experimental.custom_import pkg", 1, ['experimental.custom_import = "pkg"', 'only "" is accepted']),
    # The layout against the processes.
    (
        MOE,
        "--parallelism.tensor_parallel_degree 3",
        8,
        ["tensor_parallel_degree = 3", "must divide 8", "1, 2, 4, 8"],
    ),
    (MOE, "--parallelism.data_parallel_shard_degree 3", 4, ["shard_degree = 3", "-1 or 4", "start 3 processes"]),
    (
        MOE,
        "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_replicate_degree 4",
        4,
        ["data_parallel_replicate_degree = 4", "must divide 2, what is left of 4 processes", "1, 2"],
    ),
    (MOE, "--parallelism.expert_parallel_degree 3", 4, ["expert_parallel_degree = 3", "num_experts = 64", "1, 2, 4"]),
    (MOE, "--parallelism.expert_parallel_degree 8", 4, ["expert_parallel_degree = 8", "must divide 4 processes"]),
    (
        MOE,
        "--parallelism.expert_parallel_degree 4 --parallelism.expert_tensor_parallel_degree 2",
        4,
        ["expert_parallel_degree = 4", "expert_tensor_parallel_degree 2 must divide 4 processes", "1, 2, 4"],
    ),
    (
        MOE,
        "--parallelism.expert_tensor_parallel_degree 5",
        5,
        ["expert_tensor_parallel_degree = 5", "moe_inter_dim = 768", "use 1"],
    ),
    (MOE, "--moe.dispatcher local --parallelism.expert_parallel_degree 2", 2, ['"local"', '"alltoall"']),
    (MOE, "--moe.dispatcher nvlink", 2, ['"nvlink"', "expert_parallel_degree", '"auto"']),
    (MOE, "--moe.dispatcher deepep", 2, ["needs parallelism.expert_parallel_degree"]),
    (
        MOE,
        "--moe.dispatcher deepep --parallelism.expert_parallel_degree 2 --moe.dispatch_sms 5",
        2,
        ['"deepep"', "module deep_ep", "not installed", "github.com/deepseek-ai/DeepEP", "needs a GPU", "dispatch_sms = 5"],
    ),
    (
        MOE,
        "--moe.dispatcher hybridep --parallelism.expert_parallel_degree 2 --parallelism.expert_tensor_parallel_degree 2 "
        "--training.mixed_precision_param float32",
        4,
        ["module hybrid_ep_cpp", "hybrid-ep", "expert_tensor_parallel_degree = 2", 'mixed_precision_param = "float32"'],
    ),
    (MOE, "--moe.rebalance_interval -1", 1, ["moe.rebalance_interval = -1", ">= 0"]),
    (MOE, "--moe.stash_factor 0", 1, ["moe.stash_factor = 0", "> 0"]),
    (
        MOE,
        "--moe.stash_factor 1.5 --activation_checkpoint.mode selective",
        1,
        ["moe.stash_factor = 1.5", "activation_checkpoint.mode"],
    ),
    (MOE, "--moe.capacity_factor 0", 1, ["moe.capacity_factor = 0", "> 0"]),
    (
        MOE,
        "--moe.dispatch_domain 3 --parallelism.expert_parallel_degree 4",
        4,
        ["moe.dispatch_domain = 3", "must divide 4", "use one of 1, 2, 4"],
    ),
    (
        MOE,
        "--moe.dispatch_domain 2 --moe.dispatcher allgather --parallelism.expert_parallel_degree 4",
        4,
        ["moe.dispatch_domain = 2", "must be none", "alltoall and nvlink"],
    ),
    (
        MOE,
        "--moe.capacity_factor 1.5 --moe.dispatcher alltoall --parallelism.expert_parallel_degree 2",
        2,
        ["moe.capacity_factor = 1.5", 'moe.dispatcher = "nvlink"'],
    ),
    # The model against the layout.
    (MOE, "--parallelism.tensor_parallel_degree 16", 16, ["n_kv_heads = 8", "1, 2, 4, 8"]),
    (
        MOE,
        "--parallelism.tensor_parallel_degree 4 --training.seq_len 30",
        4,
        ["training.seq_len = 30", "use one of 1, 2"],
    ),
    (LLAMA, "--parallelism.tensor_parallel_degree 3", 3, ["tensor_parallel_degree = 3", "n_heads = 16", "dim = 256"]),
    (
        DEEPSEEK,
        "--parallelism.tensor_parallel_degree 4 --model.overrides.inter_dim 1026 --model.overrides.moe_inter_dim 129",
        4,
        ["inter_dim = 1026; use one of 1, 2", "moe_inter_dim x num_shared_experts = 258"],
    ),
    (LLAMA, "--moe.stash_factor 1.5", 1, ["moe.stash_factor = 1.5: must be none", "has no experts"]),
    (LLAMA, "--parallelism.expert_parallel_degree 2", 2, ["expert_parallel_degree = 2", "must be 1", "no experts"]),
    (QWEN_DENSE, "--parallelism.expert_tensor_parallel_degree 2", 2, ["must be 1", "qwen3 debugmodel has no experts"]),
    (QWEN_DENSE, "--moe.sequence_balance_loss_coeff 0.1", 1, ["sequence_balance_loss_coeff = 0.1", "no experts"]),
    (MOE, "--mtp.num_layers -1", 1, ["mtp.num_layers = -1", "must be >= 0"]),
    (MOE, "--mtp.num_layers 16 --training.seq_len 16", 1, ["mtp.num_layers = 16", "must be < training.seq_len = 16", "lower it"]),
    (MOE, "--mtp.num_layers 1 --mtp.loss_scaling_factor 0", 1, ["mtp.loss_scaling_factor = 0", "must be > 0"]),
    (MOE, "--mtp.loss_scaling_factor 0.1", 1, ["mtp.loss_scaling_factor = 0.1", "needs mtp.num_layers >= 1"]),
    (MOE, "--mtp.num_layer 1", 1, ["unknown key in [mtp]", "did you mean num_layers?"]),
    # The model's own arguments.
    (MOE | {"model.flavor": "30B"}, "", 1, ['model.flavor = "30B"', '"30B-A3B"', "for qwen3"]),
    (MOE | {"model.flavor": "30b-a3b"}, "", 1, ["for qwen3", "did you mean 30B-A3B?"]),
    (MOE, "--model.overrides.n_layer 4", 1, ["model.overrides.n_layer = 4", "did you mean n_layers?"]),
    (MOE, "--model.overrides.moe_args.num_expert 4", 1, ["moe_args.num_expert = 4", "did you mean num_experts?"]),
    (MOE, "--model.overrides.n_layers 4.5", 1, ["model.overrides.n_layers = 4.5", "must be an integer"]),
    (MOE, "--model.overrides.n_layers 0", 1, ["model.overrides.n_layers = 0", "must be >= 1"]),
    (MOE, "--model.overrides.n_layers.x 1", 1, ["model.overrides.n_layers.x = 1", "no argument n_layers.x"]),
    (MOE, "--model.overrides.moe_args 3", 1, ["model.overrides.moe_args = 3", "is a table"]),
    (MOE, "--model.overrides.norm_eps -1e-6", 1, ["norm_eps = -1e-06", "must be > 0"]),
    (MOE, "--model.overrides.qk_norm 1", 1, ["qk_norm = 1", "must be true or false"]),
    (MOE, "--model.overrides.max_seq_len 64", 1, ["max_seq_len = 64", "training.seq_len"]),
    (MOE, "--model.overrides.moe_args.score_func softmx", 1, ['"softmx"', "did you mean softmax?"]),
    (MOE, "--model.overrides.moe_args.score_before_experts true", 1, ["score_before_experts = true", "only false"]),
    (MOE, "--model.overrides.attn_type flash", 1, ['attn_type = "flash"', '"sdpa", "flex", "varlen"']),
    (MOE, "--model.overrides.attn_mask_type block_causal", 1, ['"block_causal"', '"causal"', 'attn_type = "sdpa"']),
    (DEEPSEEK, "--model.overrides.attn_type varlen", 1, ['attn_type = "varlen"', '"sdpa", "flex"']),
    (MOE, "--model.overrides.head_dim 7", 1, ["model.overrides.head_dim = 7", "must be even"]),
    (MOE, "--model.overrides.n_kv_heads 5", 1, ["n_kv_heads = 5", "must divide n_heads = 16", "1, 2, 4, 8, 16"]),
    (LLAMA, "--model.overrides.n_heads 24", 1, ["n_heads = 24", "must divide dim = 256"]),
    (MOE, "--model.overrides.moe_args.top_k 65", 1, ["moe_args.top_k = 65", "<= num_experts = 64"]),
    (MOE, "--model.overrides.moe_args.num_experts 4", 1, ["model.flavor", "moe_args.top_k = 8", "num_experts = 4"]),
    (
        MOE,
        "--model.overrides.moe_args.num_expert_groups 5",
        1,
        ["num_expert_groups = 5", "use one of 1, 2, 4, 8, 16, 32"],
    ),
    (MOE, "--model.overrides.moe_args.num_expert_groups 64", 1, ["num_expert_groups = 64", "groups of at least 2"]),
    (MOE, "--model.overrides.moe_args.num_expert_groups 8", 1, ["num_limited_groups = none", "must be set, from 1 to"]),
    (MOE, "--model.overrides.moe_args.num_limited_groups 8", 1, ["num_limited_groups = 8", "num_expert_groups"]),
    (
        MOE,
        "--model.overrides.moe_args.num_expert_groups 16 --model.overrides.moe_args.num_limited_groups 1",
        1,
        ["num_limited_groups = 1", "leaves 4 experts", "top_k = 8", "raise it"],
    ),
    # Steps, data and the run.
    (
        MOE,
        "--training.local_batch_size 2 --training.global_batch_size 6",
        2,
        ["training.global_batch_size = 6", "multiple of local_batch_size 2 x data-parallel 2 = 4", "use -1 or e.g."],
    ),
    (
        MOE,
        "--training.steps 50 --lr_scheduler.warmup_steps 60",
        1,
        ["lr_scheduler.warmup_steps = 60", "50 steps", "at most 50", "lr_scheduler.total_steps"],
    ),
    (
        MOE,
        "--training.steps 50 --lr_scheduler.warmup_steps 20 --lr_scheduler.decay_ratio 0.8",
        1,
        ["warmup_steps = 20", "with 40 decay steps", "at most 10"],
    ),
    (MOE, "--training.steps 50 --lr_scheduler.total_steps 40", 1, ["total_steps = 40", "training.steps = 50"]),
    (MOE, "--training.dataset wikitext", 1, ['training.dataset = "wikitext"', "stdlib", "OWNER/NAME"]),
    (MOE, "--training.dataset text", 1, ["training.dataset_path = none", 'for dataset "text"']),
    (MOE, "--training.dataset json --training.dataset_path nowhere", 1, ['dataset_path = "nowhere"', "existing file"]),
    (MOE, "--training.tokenizer huggingface --model.hf_assets_path x", 1, ['hf_assets_path = "x"', "tokenizer.json"]),
    (MOE, "--training.dataloader.prefetch_factor 2", 1, ["dataloader.prefetch_factor = 2", "num_workers > 0"]),
    (MOE, "--training.dataloader.persistent_workers", 1, ["persistent_workers = true", "num_workers > 0"]),
    (MOE, "--profiling.enable_profiling --profiling.profile_freq 3", 1, ["profile_freq = 3", "profiler_active = 4"]),
    (MOE, "--checkpoint.initial_load_path x", 1, ['initial_load_path = "x"', "checkpoint.enable = true"]),
    (
        MOE,
        "--checkpoint.enable --checkpoint.initial_load_path x",
        1,
        ['initial_load_path = "x"', "existing checkpoint"],
    ),
]


@pytest.mark.parametrize(("base", "text", "world_size", "fragments"), COMMAND_LINES)
def test_wrong_command_line(base, text, world_size, fragments):
    found = message(flags(base, text), world_size)
    for fragment in fragments:
        assert fragment in found


def test_file_that_cannot_be_read(tmp_path):
    assert 'command line: --config = "missing.toml"' in message(["--config", "missing.toml"])
    assert "No such file" in message(["--job.config_file=missing.toml"])
    assert "Is a directory" in message(["--config", str(tmp_path)])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in message(["--config", str(tmp_path / "binary.toml")])


def test_varlen_attention_needs_a_gpu(monkeypatch):
    argv = flags(LLAMA | {"model.flavor": "debugmodel_varlen_attn"}, "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert 'attn_type = "varlen": needs a GPU' in message(argv)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    load_config(argv, 1)


def test_all_problems_are_reported_at_once_with_their_source(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text("[training]\nsteps = 0\n[optimizer]\nlr = -1.0\n")
    lines = message(["--config", str(path), "--metrics.log_freq", "0"]).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        f"{path}: training.steps",
        f"{path}: optimizer.lr",
        "command line: metrics.log_freq",
    ]


def test_a_relation_names_the_source_of_its_key(tmp_path):
    path = tmp_path / "layout.toml"
    path.write_text("[parallelism]\nexpert_parallel_degree = 3\n")
    assert message([*flags(MOE, ""), "--config", str(path)], 3).startswith(f"{path}: parallelism.expert_parallel_degree")
    argv = [*flags(MOE, "--parallelism.expert_parallel_degree 6"), "--config", str(path)]
    assert message(argv, 6).startswith("command line: parallelism.expert_parallel_degree = 6")
