"""benchmarks/memory_estimate.py against counts made by hand."""

from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.memory_estimate import estimate, world_size
from moe_titan.config import load_config

ROOT = Path(__file__).parents[2]
D, F, E, VOCAB = 2048, 768, 128, 151936
EXPERTS = 3 * D * F * E  # of a layer
GATE = E * D
HEADS = 2 * D * 128 * (32 + 4) + 2 * 128 + 2 * D  # attention, its norms and the layer's
OUTSIDE = 2 * VOCAB * D + D  # embeddings, head, last norm


def qwen3(world: int, layers: int, *flags: str):
    model = ["--model.name", "qwen3", "--model.flavor", "30B-A3B", "--model.overrides.n_layers", str(layers)]
    sizes = ["--training.seq_len", "4096", "--training.local_batch_size", "2", "--training.tokenizer", "byte"]
    return estimate(load_config([*model, *sizes, *flags], world), world)


def test_one_gpu_has_no_fsdp():
    found = qwen3(1, 3, "--activation_checkpoint.mode", "none")
    assert found.parameters == 3 * (EXPERTS + HEADS + GATE) + OUTSIDE
    assert (found.states, found.gathered) == (14 * found.parameters + 2 * 3 * GATE, 0)
    T = 8192
    assert found.kept == 3 * 2 * (T * (6 * D + 32 * 4 * 128) + 8 * T * 2 * F)
    assert found.at_work == 2 * 8 * T * (3 * D + 4 * F)
    assert found.total == found.states + found.kept + found.at_work
    saved = "--float8.expert_recipe", "rowwise", "--float8.save_activations", "--float8.emulate"
    assert found.kept - qwen3(1, 3, "--activation_checkpoint.mode", "none", *saved).kept == 3 * 2 * 8 * T * F


@pytest.mark.parametrize(
    "world, replicas, expert_bytes, layout",
    [
        (8, 1, 14 / 8, "experts of one rank alone stay outside of FSDP2"),
        (16, 1, 16 / 16, "sharded over the two nodes"),
        (16, 2, 16 / 8, "reduced over the two nodes, whole in each"),
    ],
)
def test_experts_over_eight(world, replicas, expert_bytes, layout):
    degrees = ["--parallelism.expert_parallel_degree", "8", "--parallelism.data_parallel_replicate_degree", str(replicas)]
    found = qwen3(world, 2, *degrees, "--activation_checkpoint.mode", "full")
    dense = (2 * HEADS + OUTSIDE) * 16 * replicas / world
    assert found.states == pytest.approx(2 * EXPERTS * expert_bytes + 2 * 16 * GATE + dense, rel=1e-9), layout
    assert found.gathered == pytest.approx(10 * (VOCAB * D + D), rel=1e-4)
    assert found.kept == 2 * 2 * 8192 * D
    assert found.at_work == 2 * 8 * 8192 * (8 * (3 * D + 4 * F) + D)


def test_the_group_is_given_back():
    with pytest.raises(ValueError, match="needs 16 ranks"):
        config = load_config(["--config", str(ROOT / "train_configs/qwen3_30b_a3b_12l.toml"), "--training.tokenizer", "byte"], 16)
        estimate(config, 8)
    assert not dist.is_initialized()


@pytest.mark.parametrize("line, world", [("python ", 1), ("torchrun --nnodes=3 --nproc-per-node=8 ", 24)])
def test_world_is_read_from_the_command(tmp_path, line, world):
    file = tmp_path / "run.toml"
    file.write_text(f"# A run.\n# {line}train.py --config train_configs/run.toml\n\n[job]\n")
    assert world_size(file) == world


def test_a_file_without_its_command_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("# torchrun train.py --config train_configs/other.toml\n")
    with pytest.raises(ValueError, match="run.toml: no line .* says how it is started"):
        world_size(file)
