"""benchmarks/roofline.py against counts made by hand."""

import pytest

from benchmarks.roofline import parts, table
from moe_titan.config import load_config

D, F, E, V, T, LAYERS = 2048, 768, 128, 151936, 8192, 3
EXPERTS, ATTENTION = 3 * D * F, 2 * D * 128 * (32 + 4)


def qwen3(world: int, *flags: str):
    model = ["--model.name", "qwen3", "--model.flavor", "30B-A3B", "--model.overrides.n_layers", str(LAYERS)]
    sizes = ["--training.seq_len", "4096", "--training.local_batch_size", "2", "--training.tokenizer", "byte"]
    return load_config([*model, *sizes, *flags], world)


def test_parts_of_one_gpu() -> None:
    found = parts(qwen3(1), 1)
    weights = LAYERS * (8 * EXPERTS + ATTENTION + D * E) + D * V
    assert found["products"] == ("flops", pytest.approx(6 * T * weights))
    assert found["attention"] == ("flops", pytest.approx(6 * T * LAYERS * 32 * 2 * 128 * 4096 / 2))
    parameters = LAYERS * (E * EXPERTS + ATTENTION + D * E + 2 * D + 2 * 128) + 2 * D * V + D
    assert found["optimizer"] == ("memory", 28 * parameters + 4 * LAYERS * D * E)
    assert found["logits"] == ("memory", 10 * T * V)
    assert {name: amount for name, (kind, amount) in found.items() if kind == "link"} == {
        "dispatch and combine": 0,
        "FSDP2, routers": 0,
    }


def test_links_of_two_gpus() -> None:
    found = parts(qwen3(2, "--parallelism.expert_parallel_degree", "2"), 2)
    assert found["dispatch and combine"] == ("link", 4 * LAYERS * T * D * 2)
    dense = LAYERS * (ATTENTION + D * E + 2 * D + 2 * 128) + 2 * D * V + D
    assert found["FSDP2, routers"] == ("link", pytest.approx(8 * dense / 2))
    routers = LAYERS * D * E
    assert found["optimizer"] == ("memory", pytest.approx(28 * LAYERS * E * EXPERTS / 2 + 32 * (dense + routers) / 2))


def test_times() -> None:
    lines = table(qwen3(1), 1, {"flops": 1e15, "memory": 1e12, "link": 1e11})
    flops = sum(amount for kind, amount in parts(qwen3(1), 1).values() if kind == "flops")
    memory = sum(amount for kind, amount in parts(qwen3(1), 1).values() if kind == "memory")
    seconds = flops / 1e15 + memory / 1e12
    assert lines[-1].startswith("work and link") and f"{seconds * 1e3:.1f} ms, {T / seconds:,.0f} tokens/s" in lines[-1]
