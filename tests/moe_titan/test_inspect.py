"""What `inspect` says of sound and of damaged checkpoints."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_runs
from interchange_models import write_transformers
from torch import Tensor

from moe_titan import convert, inspect
from moe_titan.interchange import InterchangeError
from moe_titan.interchange.dcp import Checkpoint

W1, W2, W3 = (f"layers.1.moe.experts.{weight}" for weight in ("w1", "w2", "w3"))


def run(capsys, *argv: object) -> tuple[int, str]:
    code = inspect.main([str(argument) for argument in argv])
    return code, capsys.readouterr().out


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "hf"
    write_transformers("deepseek_v3", folder)
    return folder


@pytest.fixture(scope="module")
def sound(hugging_face) -> dict[str, Tensor]:
    folder = hugging_face.with_name("dcp")
    assert convert.main([str(hugging_face), str(folder)]) == 0
    return {key: Checkpoint(folder).tensor(key).load() for key in Checkpoint(folder).stored}


@pytest.fixture
def checkpoint(tmp_path, sound):
    """Writes the sound model, changed, and with moments of a run if asked."""

    def write(change=lambda tensors: None, **state) -> Path:
        tensors = {key: tensor.clone() for key, tensor in sound.items()}
        change(tensors)
        dcp.save(tensors | state, checkpoint_id=tmp_path / "step-1", no_dist=True)
        return tmp_path / "step-1"

    return write


@pytest.mark.parametrize("form", ["dcp", "hf"])
def test_a_sound_model(capsys, hugging_face, sound, form) -> None:
    code, text = run(capsys, hugging_face.with_name(form))
    assert code == 0
    assert "no NaN, no infinity, no tensor of zeros, no equal experts" in text
    rows = {name: int(count.replace(",", "")) for name, count in re.findall(r"^(\S.*?)\s+float32\s+\d+\s+([\d,]+)", text, re.M)}
    size = {key: tensor.numel() for key, tensor in sound.items()}
    assert rows == {
        "attention": sum(n for key, n in size.items() if ".attention.w" in key),
        "dense feed-forward": 3 * 24 * 40,
        "embedding": 40 * 24,
        "expert bias": 6,
        "norm": sum(n for key, n in size.items() if "norm" in key),
        "output": 40 * 24,
        "routed experts": 3 * 6 * 24 * 12,
        "router": 6 * 24,
        "shared experts": 3 * 24 * 24,
    }
    assert f"{sum(size.values()):,}" in text.split("model ")[-1]


def test_planted_faults(capsys, checkpoint) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"][3] = float("nan")
        tensors["output.weight"][:2] = float("inf")
        tensors["layers.0.attention.wo.weight"].zero_()
        tensors[W2][4] = 0
        for key in (W1, W2, W3):
            tensors[key][5] = tensors[key][2]
            tensors[key][3] = tensors[key][2]
        # Equal experts are equal weight by weight.
        tensors[W1][1], tensors[W3][1], tensors[W2][1] = tensors[W3][0], tensors[W1][0], tensors[W2][0]

    moments = {"state.norm.weight.exp_avg": torch.full((24,), float("nan")), "state.norm.weight.step": torch.tensor(1.0)}
    code, text = run(capsys, checkpoint(change, optimizer=moments))
    assert code == 1
    assert sorted(text.split("findings:\n")[1].splitlines()) == [
        "  layers.0.attention.wo.weight: all zero",
        f"  {W2}: all zero in expert 4",
        "  layers.1.moe: experts 2, 3, 5 are equal in all weights",
        "  norm.weight: 1 of 24 values are NaN or infinite",
        "  optimizer.state.norm.weight.exp_avg: 24 of 24 values are NaN or infinite",
        "  output.weight: 48 of 960 values are NaN or infinite",
    ]
    assert run(capsys, "--no-values", checkpoint(change))[0] == 0


def test_equal_experts_in_a_hugging_face_folder(capsys, tmp_path, checkpoint, hugging_face) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in (W1, W2, W3):
            tensors[key][1] = tensors[key][0]

    path = checkpoint(change)
    shutil.copy(hugging_face / "config.json", path)
    assert convert.main([str(path), str(tmp_path / "hf")]) == 0
    code, text = run(capsys, tmp_path / "hf")
    assert code == 1 and "model.layers.1.mlp: experts 0, 1 are equal in all weights" in text


def test_a_run(pool, capsys, tmp_path) -> None:
    corpus = trainer_runs.write_corpus(tmp_path / "corpus")
    layout = trainer_runs.layout(dps=2, ep=2)
    argv = trainer_runs.arguments(corpus, tmp_path / "run", trainer_runs.MODELS["deepseek"], layout, {"training.steps": 3})
    pool.run(2, trainer_runs.run, argv, group=False)
    code, text = run(capsys, tmp_path / "run" / "checkpoint" / "step-3")
    assert code == 0, text
    facts = dict(re.findall(r"^(format|step|tokens|written in|layout|checksums)  +(.*)$", text, re.M))
    assert facts["format"] == "torch.distributed.checkpoint, keys of torchtitan 0.2.2"
    assert facts["step"] == "3" and facts["tokens"] == str(3 * 12 * 24)
    assert facts["written in"] == "2 files by 2 writers"
    assert facts["layout"] == "dp_shard 2, ep 2" and facts["checksums"] == "right"
    assert re.search(r"^optimizer +float32", text, re.M)
    file = tmp_path / "run" / "checkpoint" / "step-3" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InterchangeError, match="__1_0.distcp is damaged: its CRC-32"):
        run(capsys, file.parent)
    assert re.search("^checksums +not looked at", run(capsys, "--no-values", file.parent)[1], re.M)


def test_damaged_checkpoints(capsys, tmp_path, checkpoint) -> None:
    path = checkpoint()
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(InterchangeError, match=f"{file.name} is cut off: {len(data) // 2} of {len(data)} bytes"):
        run(capsys, path)
    file.unlink()
    with pytest.raises(InterchangeError, match=f"{file.name} is missing"):
        run(capsys, path)
    (path / ".metadata").write_bytes(b"torn")
    with pytest.raises(InterchangeError, match=".metadata: cannot be read"):
        run(capsys, path)
    with pytest.raises(InterchangeError, match="neither a complete checkpoint"):
        run(capsys, tmp_path)
