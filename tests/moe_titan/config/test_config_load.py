"""Reading a configuration: torchtitan's files, precedence, spellings, resolution, round trip, help."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import JobConfig

from moe_titan.config import Config, build_model_args, load_config, to_toml
from moe_titan.config.sections import KEYS
from moe_titan.config.unsupported import REFUSED, WITHOUT_EFFECT

ASSETS = Path(__file__).parents[2] / "assets" / "torchtitan"
TOKENIZER = ["--model.hf_assets_path", str(ASSETS / "tokenizer")]
MOE = ["--model.name=qwen3", "--model.flavor=debugmodel_moe", "--training.tokenizer=byte"]


def job_config_keys(section: Any, prefix: str = "") -> dict[str, object]:
    keys: dict[str, object] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        nested = dataclasses.is_dataclass(value)
        keys |= job_config_keys(value, f"{prefix}{item.name}.") if nested else {prefix + item.name: value}
    return keys


def test_every_key_of_torchtitan_is_known_with_its_default():
    ours = {name: key.default for name, key in KEYS.items()}
    ours |= {name: default for name, (default, _) in REFUSED.items()} | WITHOUT_EFFECT
    theirs = job_config_keys(JobConfig())
    assert theirs.pop("debug.seed") is None and ours["debug.seed"] == 0
    assert {name: ours.get(name, "unknown key") for name in theirs} == theirs


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.toml")), ids=lambda path: path.stem)
def test_torchtitan_file_is_accepted(path):
    config = load_config(["--config", str(path), *TOKENIZER], world_size=8)
    assert config.parallelism.data_parallel_shard_degree == 8
    assert config.model.name in ("deepseek_v3", "qwen3")
    assert build_model_args(config).max_seq_len == config.training.seq_len


def test_there_are_four_torchtitan_files():
    assert len(list(ASSETS.glob("*.toml"))) == 4


def test_command_line_wins_over_toml_and_toml_over_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 300\nseq_len = 64\n[model.overrides]\nn_layers = 3\ndim = 64\n")
    config = load_config(["--training.steps", "400", "--model.overrides.n_layers=5", "--config", str(path), *MOE], 1)
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (400, 64, 8)
    args = build_model_args(config)
    assert (args.n_layers, args.dim, args.n_heads) == (5, 64, 16)
    assert config.job.config_file == str(path)


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--compile.enable", "compile.enable", True),
        ("--compile.enable true", "compile.enable", True),
        ("--compile.enable=False", "compile.enable", False),
        ("--compile.components loss", "compile.components", ["loss"]),
        ("--compile.components model,loss", "compile.components", ["model", "loss"]),
        ('--compile.components ["loss"]', "compile.components", ["loss"]),
        ("--compile.components=", "compile.components", []),
        ("--optimizer.lr 1e-3", "optimizer.lr", 1e-3),
        ("--training.max_norm 2", "training.max_norm", 2.0),
        ("--training.steps 2_000", "training.steps", 2000),
        ("--training.global-batch-size 16", "training.global_batch_size", 16),
        ("--lr_scheduler.decay_ratio none", "lr_scheduler.decay_ratio", None),
        ("--activation_checkpoint.selective_ac_option 3", "activation_checkpoint.selective_ac_option", "3"),
        ("--training.dataset Salesforce/wikitext", "training.dataset", "Salesforce/wikitext"),
        ("--training.dataloader.num_workers 2", "training.dataloader.num_workers", 2),
    ],
)
def test_spellings_on_the_command_line(flag, name, value):
    found = load_config([*MOE, *flag.split()], 1).get(name)
    assert found == value and type(found) is type(value)


def test_toml_integer_is_a_float_where_one_is_asked_for(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nmax_norm = 2\n[model.overrides]\nrope_theta = 500\n")
    config = load_config(["--config", str(path), *MOE], 1)
    assert type(config.training.max_norm) is float
    assert type(build_model_args(config).rope_theta) is float


def test_keys_of_torchtitan_without_effect_are_accepted_on_the_command_line():
    load_config([*MOE, "--parallelism.pipeline_parallel_schedule", "DualPipeV", "--metrics.enable_wandb", "false"], 1)


@pytest.mark.parametrize(
    ("degrees", "world_size", "shard", "global_batch"),
    [
        ("", 1, 1, 3),
        ("tensor=2", 8, 4, 12),
        ("tensor=2 data_replicate=2", 8, 2, 12),
        ("data_shard=2 tensor=3", 6, 2, 6),
    ],
)
def test_degrees_are_resolved(degrees, world_size, shard, global_batch):
    names = {
        "tensor": "tensor_parallel",
        "data_replicate": "data_parallel_replicate",
        "data_shard": "data_parallel_shard",
    }
    argv = [f"--parallelism.{names[d.split('=')[0]]}_degree={d.split('=')[1]}" for d in degrees.split()]
    sizes = {"n_heads": 12, "n_kv_heads": 6, "dim": 96, "vocab_size": 300}
    argv += [f"--model.overrides.{name}={size}" for name, size in sizes.items()]
    config = load_config([*MOE, *argv, "--training.local_batch_size=3", "--training.seq_len=24"], world_size)
    assert config.parallelism.data_parallel_shard_degree == shard
    assert config.training.global_batch_size == global_batch


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2), (2, 2)])
def test_every_expert_degree_that_fits_is_accepted(ep, etp):
    degrees = {"tensor": 2, "expert": ep, "expert_tensor": etp}
    argv = [f"--parallelism.{name}_parallel_degree={degree}" for name, degree in degrees.items()]
    assert load_config([*MOE, *argv], 8).parallelism.data_parallel_shard_degree == 4


def test_default_warmup_is_shortened_to_a_short_run():
    assert load_config([*MOE, "--training.steps=50"], 1).lr_scheduler.warmup_steps == 50
    short = load_config([*MOE, "--training.steps=50", "--lr_scheduler.decay_ratio=0.8"], 1)
    assert short.lr_scheduler.warmup_steps == 10
    assert load_config(MOE, 1).lr_scheduler.warmup_steps == 200


def test_model_args_are_a_copy_with_the_overrides():
    from torchtitan.models.qwen3 import qwen3_args

    overrides = {"n_layers": "2", "moe_args.num_experts": "16", "moe_args.load_balance_coeff": "none"}
    argv = [f"--model.overrides.{name}={value}" for name, value in overrides.items()]
    args = build_model_args(load_config([*MOE, *argv, "--training.seq_len=8192", "--debug.moe_force_load_balance"], 1))
    assert (args.n_layers, args.moe_args.num_experts, args.max_seq_len) == (2, 16, 8192)
    assert args.moe_args.load_balance_coeff is None and args.moe_args._debug_force_load_balance
    flavor = qwen3_args["debugmodel_moe"]
    assert (flavor.n_layers, flavor.moe_args.num_experts, flavor.max_seq_len) == (8, 64, 4096)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "llama3"])
def test_model_args_come_without_warnings(name, caplog):
    argv = [f"--model.name={name}", "--training.tokenizer=byte", "--training.seq_len=200000"]
    args = build_model_args(load_config(argv, 1))
    assert not caplog.records
    assert name == "llama3" or args.moe_args.use_grouped_mm


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.toml")), ids=lambda path: path.stem)
def test_round_trip(path, tmp_path):
    argv = ["--config", str(path), *TOKENIZER, '--job.description=say "hi"\t\\ ü🙂', "--compile.components="]
    argv += ["--model.overrides.moe_args.load_balance_coeff=none", "--model.overrides.norm_eps=1e-7"]
    config = load_config(argv, 8)
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(config), encoding="utf-8")
    again = load_config(["--config", str(saved)], 8)
    assert again.job.config_file == str(saved)
    again.job.config_file = config.job.config_file
    assert again == config
    assert build_model_args(again) == build_model_args(config)


def test_round_trip_of_the_defaults(tmp_path):
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(Config()))
    argv = ["--config", str(saved), "--training.tokenizer=byte"]
    config = load_config(argv, 1)
    config.job.config_file = None
    assert config == load_config(["--training.tokenizer=byte"], 1)


def test_help_lists_every_key_with_type_default_and_doc(capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"], 1)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name, key in KEYS.items():
        entry = text[text.index(f"--{name}  (") :].split("\n--")[0]
        assert key.doc in entry and "default " in entry
    for name in [*REFUSED, *WITHOUT_EFFECT, "model.overrides"]:
        assert f"--{name}" in text
