"""Every file in train_configs/ is accepted, on the smallest number of processes that its layout fits."""

import math
import tomllib
from pathlib import Path

import pytest

from moe_titan.config import build_model_args, load_config
from moe_titan.flops import train_flops_per_token

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "train_configs").glob("*.toml"))


def smallest_world(file: Path) -> int:
    degrees = tomllib.loads(file.read_text())["parallelism"]
    dense = degrees.get("tensor_parallel_degree", 1) * abs(degrees.get("data_parallel_shard_degree", -1))
    return math.lcm(dense, degrees.get("expert_parallel_degree", 1))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_is_accepted(file):
    # A model's own tokenizer is not in the repository.
    folder = "tests/assets/torchtitan/tokenizer"
    config = load_config(["--config", str(file), "--model.hf_assets_path", folder], smallest_world(file))
    assert config.job.dump_folder == f"outputs/{file.stem}"


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
