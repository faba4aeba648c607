"""Upcycled models against the dense ones that they come from."""

import sys
from pathlib import Path

import pytest
import torch
import trainer_runs
from interchange_models import our_logits, transformers_logits, write_transformers
from torch import Tensor

from moe_titan import convert, upcycle
from moe_titan.interchange import InterchangeError, command
from moe_titan.interchange.dcp import Checkpoint
from moe_titan.interchange.flavors import args_from_toml
from moe_titan.interchange.safetensors_folder import SafetensorsFolder
from moe_titan.interchange.stored_model import read_model

DENSE = ["qwen3", "qwen3, tied", "llama", "llama, scaled rope"]


def numbers(granularity: int, copies: int, top_k: int, *more: object) -> list[str]:
    return [*f"--granularity {granularity} --copies {copies} --top-k {top_k}".split(), *map(str, more)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Folder of a random dense model of `transformers`, and its logits."""
    cache: dict[str, tuple[Path, Tensor]] = {}

    def get(name: str) -> tuple[Path, Tensor]:
        if name not in cache:
            folder = tmp_path_factory.mktemp("dense")
            cache[name] = folder, write_transformers(name, folder)
        return cache[name]

    return get


def run(source: Path, target: Path, *options: str) -> None:
    assert upcycle.main([str(source), str(target), *options]) == 0


def upcycled_logits(checkpoint: Path) -> Tensor:
    return our_logits(*args_from_toml(checkpoint / "model.toml"), checkpoint)


@pytest.mark.parametrize("name", DENSE[:3])
@pytest.mark.parametrize(
    "options",
    [
        numbers(1, 4, 1),
        numbers(1, 3, 2),
        numbers(3, 1, 3),
        numbers(3, 2, 3),
        numbers(2, 3, 4),
        numbers(3, 2, 6),
        numbers(9, 2, 9),
    ],
    ids=lambda options: "G{1} X{3} k{5}".format(*options),
)
def test_starts_as_the_dense_model(dense, tmp_path, name, options) -> None:
    source, logits = dense(name)
    run(source, tmp_path / "moe", *options)
    torch.testing.assert_close(upcycled_logits(tmp_path / "moe"), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_shared_experts(dense, tmp_path, shared) -> None:
    source, logits = dense("qwen3")
    run(source, tmp_path / "moe", *numbers(3, 2, 3, "--shared-experts", shared))
    torch.testing.assert_close(upcycled_logits(tmp_path / "moe"), logits, rtol=0, atol=1e-5)
    weights = Checkpoint(tmp_path / "moe")
    assert weights.tensor("layers.0.moe.shared_experts.w1.weight").shape == (12 * shared, 24)
    assert all(weights.tensor(key).load().any() for key in weights.stored if not key.endswith("expert_bias"))


def test_from_a_checkpoint_and_to_hugging_face(dense, tmp_path) -> None:
    source, logits = dense("qwen3")
    assert convert.main([str(source), str(tmp_path / "dcp")]) == 0
    run(tmp_path / "dcp", tmp_path / "moe", *numbers(2, 4, 2, "--to", "hf"))
    torch.testing.assert_close(transformers_logits(tmp_path / "moe"), logits, rtol=0, atol=1e-5)


def test_experts_are_scaled_shards(dense, tmp_path) -> None:
    """w1 as it was, w3 and w2 times the root of G: expert x * G + g is copy x of shard g."""
    source, _ = dense("qwen3")
    run(source, tmp_path / "moe", *numbers(3, 2, 3))
    weights, plain = Checkpoint(tmp_path / "moe"), read_model(source).tensors
    for key, dim, factor in (("w1", 0, 1), ("w3", 0, 3**0.5), ("w2", 1, 3**0.5)):
        shards = plain[f"layers.1.feed_forward.{key}.weight"].load().chunk(3, dim)
        expected = torch.stack([shards[expert % 3] * factor for expert in range(6)])
        torch.testing.assert_close(weights.tensor(f"layers.1.moe.experts.{key}").load(), expected)
    gate = weights.tensor("layers.1.moe.router.gate.weight").load().view(2, 3, 24)
    assert torch.equal(gate, gate[:, :1].expand_as(gate)) and not torch.equal(gate[0], gate[1])


def test_every_dense_tensor_is_read_once(dense, tmp_path, monkeypatch) -> None:
    read: list[str] = []
    load = SafetensorsFolder._load
    monkeypatch.setattr(SafetensorsFolder, "_load", lambda self, name: read.append(name) or load(self, name))
    run(dense("qwen3")[0], tmp_path / "moe", *numbers(3, 4, 3, "--shared-experts", 2))
    assert len(read) == len(set(read))


def test_noise(dense, tmp_path) -> None:
    source, logits = dense("qwen3")
    for name, more in (("plain", ()), ("a", ("--noise", 0.05)), ("b", ("--noise", 0.05)), ("c", ("--noise", 0.05, "--seed", 1))):
        run(source, tmp_path / name, *numbers(2, 3, 2, *more))
    plain, a, b, c = (Checkpoint(tmp_path / name).tensor("layers.1.moe.experts.w2").load() for name in ("plain", "a", "b", "c"))
    assert torch.equal(a, b) and not torch.equal(a, c)
    changes = (a - plain).flatten(1)
    torch.testing.assert_close(changes.std(1), 0.05 * plain.flatten(1).std(1), rtol=0.2, atol=0)
    assert len({tuple(change.tolist()) for change in changes}) == 6
    difference = (upcycled_logits(tmp_path / "a") - logits).abs().max()
    assert 1e-4 < difference < 1


def test_rope_scaling(dense, tmp_path) -> None:
    source, logits = dense("llama, scaled rope")
    with pytest.raises(InterchangeError, match="scaled by 8.0.* --drop-rope-scaling"):
        run(source, tmp_path / "moe", *numbers(1, 2, 1))
    run(source, tmp_path / "moe", *numbers(1, 2, 1, "--drop-rope-scaling"))
    assert (upcycled_logits(tmp_path / "moe") - logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3", numbers(5, 1, 5), "granularity = 5: must divide the feed-forward's 36 hidden features"),
        ("qwen3", numbers(2, 3, 3), "top_k = 3: must be a multiple of granularity = 2"),
        ("qwen3", numbers(2, 3, 8), "top_k = 8: .* at most the 6 experts"),
        ("qwen3", numbers(2, 3, 2, "--shared-experts", 3), "shared_experts = 3: must be at most granularity = 2"),
        ("qwen3_moe", numbers(2, 3, 2), "this qwen3 has experts already"),
        ("deepseek_v3", numbers(2, 3, 2), "this deepseek_v3 has experts already or another attention"),
        ("llama", numbers(2, 3, 2, "--to", "hf"), "qwen3_moe has no counterpart of qk_norm = false"),
    ],
)
def test_wrong_input(dense, tmp_path, name, options, message) -> None:
    with pytest.raises(InterchangeError, match=message):
        run(dense(name)[0], tmp_path / "moe", *options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [numbers(0, 1, 1), numbers(1, 1, 1, "--noise", -1), numbers(1, 1, 1, "--shared-experts", -1)])
def test_numbers_that_make_no_sense(dense, tmp_path, options, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["upcycle", str(dense("qwen3")[0]), str(tmp_path / "moe"), *options])
    with pytest.raises(SystemExit) as exit:
        command.run(upcycle.main)
    assert exit.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_blocks_that_predict_further_tokens_are_not_upcycled(pool, tmp_path) -> None:
    corpus, folder = trainer_runs.write_corpus(tmp_path / "corpus"), tmp_path / "run"
    settings = {"training.steps": 1, "mtp.num_layers": 1, "lr_scheduler.warmup_steps": 0}
    pool.run(
        1, trainer_runs.run, trainer_runs.arguments(corpus, folder, trainer_runs.MODELS["qwen3_tied"], settings), group=False
    )
    options = [str(folder / "checkpoint" / "step-1"), str(tmp_path / "moe"), *numbers(1, 2, 1)]
    with pytest.raises(InterchangeError, match="predicts further tokens, .* --drop-mtp leaves them out"):
        upcycle.main(options)
    assert upcycle.main([*options, "--drop-mtp"]) == 0
    assert not any(key.startswith("mtp_layers.") for key in Checkpoint(tmp_path / "moe").stored)
