"""Every file in train_configs/ is accepted by the processes that its own command line starts, and fits their memory."""

import re
from pathlib import Path

import pytest

from benchmarks.memory_estimate import GIB, estimate, world_size
from moe_titan.config import build_model_args, load_config
from moe_titan.flops import train_flops_per_token

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "train_configs").glob("*.toml"))
MODELS = ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3_16b", "deepseek_v3_671b")
# A model's own tokenizer is not in the repository.
TOKENIZER = ["--model.hf_assets_path", "tests/assets/torchtitan/tokenizer"]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_model_has_a_file_for_every_size():
    names = {file.stem for file in FILES}
    assert {f"{model}_{size}" for model in MODELS for size in ("1gpu", "1node", "nodes")} < names
    for size, worlds in {"1gpu": {1}, "1node": {8}, "nodes": {32, 64, 512}}.items():
        assert {world_size(file) for file in FILES if file.stem.endswith(size)} == worlds


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_is_accepted_laid_out_and_fits(file):
    world = world_size(file)
    config = load_config(["--config", str(file), *TOKENIZER], world)
    assert config.job.dump_folder == f"outputs/{file.stem}"
    found = estimate(config, world)
    assert found.total < 120 * GIB  # of 140
    row = re.search(rf"^\| `{file.stem}` \| (.*) \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    if file.stem != "debug":
        assert row and row[1] == found.cells(), "docs/performance.md: run benchmarks/memory_estimate.py"


@pytest.mark.parametrize("file", [file for file in FILES if "nodes" in file.stem], ids=lambda file: file.stem)
def test_more_nodes_are_accepted(file):
    world = 2 * world_size(file)
    config = load_config(["--config", str(file), *TOKENIZER], world)
    assert config.parallelism.data_parallel_shard_degree * config.parallelism.data_parallel_replicate_degree == world


@pytest.mark.parametrize(
    "name, gflop, recompute", [("qwen3_30b_a3b_12l", 7.17, "none"), ("deepseek_v3_16b_12l", 7.98, "selective")]
)
def test_benchmark_shapes(name, gflop, recompute):
    config = load_config(["--config", f"train_configs/{name}.toml"], 2)
    args = build_model_args(config)
    assert args.n_layers == 12
    assert train_flops_per_token(args, config.training.seq_len) / 1e9 == pytest.approx(gflop, abs=0.005)
    assert (config.training.local_batch_size, config.training.seq_len, config.training.steps) == (4, 4096, 50)
    assert config.training.mixed_precision_param == "bfloat16" and config.training.dtype == "float32"
    assert config.parallelism.expert_parallel_degree == 2 and config.compile.enable
    assert config.activation_checkpoint.mode == recompute
