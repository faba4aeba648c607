"""Conversion against `transformers`: logits both ways, round trips bit by bit, FP8, runs of ours, and wrong input."""

import json
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_runs
from interchange_models import CONFIGS, VOCAB, our_logits, transformers_logits, write_transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_titan import convert
from moe_titan.config import build_model_args, load_config
from moe_titan.interchange import InterchangeError
from moe_titan.interchange.architectures import config_from_args
from moe_titan.interchange.dcp import Checkpoint
from moe_titan.interchange.flavors import args_from_toml
from moe_titan.interchange.safetensors_folder import SafetensorsFolder
from moe_titan.interchange.stored_model import read_model

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"


def run(*argv: object) -> int:
    return convert.main([str(argument) for argument in argv])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor), key


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folder of a random model of `transformers`, its checkpoint as converted, and its logits."""
    cache: dict[str, tuple[Path, Path, Tensor]] = {}

    def get(name: str) -> tuple[Path, Path, Tensor]:
        if name not in cache:
            folder = tmp_path_factory.mktemp("stored")
            logits = write_transformers(name, folder / "hf", max_shard_size="8KB")
            (folder / "hf" / "tokenizer.json").write_text("{}")
            (folder / "hf" / "pytorch_model.bin").write_text("not a tokenizer")
            assert run(folder / "hf", folder / "dcp") == 0
            cache[name] = folder / "hf", folder / "dcp", logits
        return cache[name]

    return get


@pytest.mark.parametrize("name", CONFIGS)
def test_import_and_back(stored, tmp_path, name) -> None:
    source, checkpoint, logits = stored(name)
    model = read_model(checkpoint)
    torch.testing.assert_close(our_logits(model.name, model.args, checkpoint), logits, rtol=0, atol=1e-5)
    assert run(checkpoint, tmp_path / "hf", "--shard-gb", 8e-6) == 0
    assert_bitwise(tensors_of(tmp_path / "hf"), tensors_of(source))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "hf" / "pytorch_model.bin").exists()
    assert torch.equal(transformers_logits(tmp_path / "hf"), logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_description(stored, tmp_path, name) -> None:
    """model.toml makes a run build this model, and an export by it alone has the same function in `transformers`."""
    _, checkpoint, logits = stored(name)
    args = read_model(checkpoint).args
    toml = tmp_path / "run.toml"
    toml.write_text((checkpoint / "model.toml").read_text() + f"\n[training]\nseq_len = {args.max_seq_len}\n")
    config = load_config(["--config", str(toml), "--training.tokenizer=byte"], world_size=1)
    built = build_model_args(config)
    assert torch.equal(our_logits(config.model.name, built, checkpoint), our_logits(config.model.name, args, checkpoint))
    assert run(checkpoint, tmp_path / "hf", "--config", toml) == 0
    torch.testing.assert_close(transformers_logits(tmp_path / "hf"), logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_stock_dcp_reads_an_import(stored, name) -> None:
    _, checkpoint, _ = stored(name)
    model = read_model(checkpoint)
    state = {key: torch.empty(entry.size) for key, entry in Checkpoint(checkpoint).entries.items()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    for key, tensor in state.items():
        assert torch.equal(tensor, Checkpoint(checkpoint).tensor(key).load()), key
    assert state.keys() == model.tensors.keys()


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen3_moe", "deepseek_v3"])
def test_every_tensor_is_read_once(stored, tmp_path, monkeypatch, name) -> None:
    source, checkpoint, _ = stored(name)
    read: Counter[str] = Counter()

    def counting(function):
        def load(self, name, *rest):
            read[name] += 1
            return function(self, name, *rest)

        return load

    monkeypatch.setattr(SafetensorsFolder, "_load", counting(SafetensorsFolder._load))
    run(source, tmp_path / "dcp")
    assert read == Counter(tensors_of(source).keys())
    read.clear()
    monkeypatch.setattr(Checkpoint, "_read", counting(Checkpoint._read))
    run(checkpoint, tmp_path / "hf", "--dtype", "bfloat16")
    assert set(read.values()) == {1}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_few_tensors_are_held_at_once(tmp_path, monkeypatch, name) -> None:
    """In a model of many layers, of which the checkpoint's writer holds one's."""
    write_transformers(name, tmp_path / "hf", layers=12)
    held: list[tuple[StorageWeakRef, int]] = []
    most = 0

    def watching(function):
        def load(self, *args):
            nonlocal most
            tensor = function(self, *args)
            held.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
            most = max(most, sum(size for one, size in held if not one.expired()))
            return tensor

        return load

    monkeypatch.setattr(SafetensorsFolder, "_load", watching(SafetensorsFolder._load))
    monkeypatch.setattr(Checkpoint, "_read", watching(Checkpoint._read))
    whole = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "hf").values())
    for source, target in (("hf", "dcp"), ("dcp", "back")):
        run(tmp_path / source, tmp_path / target)
        assert 0 < most <= whole / 12, f"{source} to {target}: {most} of {whole} bytes"
        most = 0


@pytest.mark.parametrize(("model", "mtp_layers"), [("qwen3", 0), ("qwen3", 1), ("deepseek", 0), ("deepseek", 2)])
def test_export_of_a_run(pool, tmp_path, model, mtp_layers) -> None:
    """Saved by two ranks that share the experts; the run's own config.toml says what model it is."""
    corpus, folder = trainer_runs.write_corpus(tmp_path / "corpus"), tmp_path / "run"
    settings = {"training.steps": 3, "model.overrides.norm_eps": 1e-6, "mtp.num_layers": mtp_layers}
    argv = trainer_runs.arguments(corpus, folder, trainer_runs.MODELS[model], settings, trainer_runs.layout(dps=2, ep=2))
    pool.run(2, trainer_runs.run, argv, group=False)
    checkpoint = folder / "checkpoint" / "step-3"
    options = ["--drop-expert-bias"] if model == "qwen3" else []
    if options and mtp_layers:
        with pytest.raises(InterchangeError, match="mtp_layers.0.* predicts further tokens, .* --drop-mtp"):
            run(checkpoint, tmp_path / "hf", *options)
        options.append("--drop-mtp")
    elif options:
        with pytest.raises(InterchangeError, match="layers.0.moe.expert_bias is not zero .* --drop-expert-bias"):
            run(checkpoint, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()
    assert run(checkpoint, tmp_path / "hf", *options) == 0
    config = load_config(argv, world_size=2)
    args = build_model_args(config)
    if options:
        args.moe_args.load_balance_coeff = None
    if model == "deepseek":
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == mtp_layers
        assert any(".3.shared_head." in name for name in tensors_of(tmp_path / "hf")) == (mtp_layers == 2)
    ours = our_logits(config.model.name, args, checkpoint)
    torch.testing.assert_close(transformers_logits(tmp_path / "hf"), ours, rtol=0, atol=1e-4)


def quantize(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """FP8 and a scale for each block, in plain loops."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    quantized = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[place].abs().max() / 448
            quantized[place] = (weight[place] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8(stored, tmp_path, dtype) -> None:
    source = stored("deepseek_v3")[0]
    stored_tensors, expected = {}, {}
    for key, tensor in tensors_of(source).items():
        stored_tensors[key] = expected[key] = tensor
        if "proj" in key:
            weight, scale = quantize(tensor, 5)
            stored_tensors |= {key: weight, key + "_scale_inv": scale}
            expected[key] = torch.tensor(
                [[weight[i, j].float() * scale[i // 5, j // 5] for j in range(weight.shape[1])] for i in range(weight.shape[0])]
            )
    (tmp_path / "fp8").mkdir()
    save_file(stored_tensors, tmp_path / "fp8" / "model.safetensors")
    (tmp_path / "fp8" / "config.json").write_text((source / "config.json").read_text())
    edit_config(tmp_path / "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [5, 5]})
    run(tmp_path / "fp8", tmp_path / "dcp", "--dtype", dtype)
    run(tmp_path / "dcp", tmp_path / "hf")
    to = getattr(torch, dtype)
    expected = {key: t if key.endswith("correction_bias") else t.to(to) for key, t in expected.items()}
    assert_bitwise(tensors_of(tmp_path / "hf"), expected)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == dtype and "quantization_config" not in config


def test_files_and_index(stored, tmp_path) -> None:
    _, checkpoint, _ = stored("qwen3_moe")
    run(checkpoint, tmp_path / "hf", "--shard-gb", 6e-6, "--dtype", "bfloat16")
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for file in files:
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert {key for key, name in index["weight_map"].items() if name == file.name} == set(handle.keys())
            sizes = [handle.get_tensor(key).nbytes for key in handle.keys()]
        assert sum(sizes) <= 6000 or len(sizes) == 1
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    tensors = tensors_of(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def predicting_further(source: Path, folder: Path, depths: int, **changed: Tensor) -> dict[str, Tensor]:
    """A model of `transformers` with random blocks behind its layers that predict further tokens, as DeepSeek stores them."""
    tensors, random = tensors_of(source), torch.Generator().manual_seed(5)
    last = {name.split("layers.1.")[1]: tensor for name, tensor in tensors.items() if "layers.1." in name}
    last |= {"enorm.weight": torch.ones(24), "hnorm.weight": torch.ones(24), "shared_head.norm.weight": torch.ones(24)}
    last["eh_proj.weight"] = torch.ones(24, 48)
    more = {}
    for layer in range(2, 2 + depths):
        more |= {f"model.layers.{layer}.{name}": torch.randn(tensor.shape, generator=random) for name, tensor in last.items()}
        more[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir()
    save_file(tensors | more | changed, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    edit_config(folder, num_nextn_predict_layers=depths)
    return tensors | more


def test_prediction_of_further_tokens(stored, tmp_path, monkeypatch) -> None:
    source, _, logits = stored("deepseek_v3, groups and yarn")
    every = predicting_further(source, tmp_path / "hf", 2)
    read: Counter[str] = Counter()

    def counting(function):
        def load(self, name, *rest):
            read[name] += 1
            return function(self, name, *rest)

        return load

    monkeypatch.setattr(SafetensorsFolder, "_load", counting(SafetensorsFolder._load))
    run(tmp_path / "hf", tmp_path / "dcp")
    assert read == Counter(every.keys())
    assert "num_layers = 2" in (tmp_path / "dcp" / "model.toml").read_text()
    checkpoint = Checkpoint(tmp_path / "dcp")
    for ours, theirs in {
        "mtp_layers.0.eh_proj.weight": "model.layers.2.eh_proj.weight",
        "mtp_layers.0.enorm.weight": "model.layers.2.enorm.weight",
        "mtp_layers.1.hnorm.weight": "model.layers.3.hnorm.weight",
        "mtp_layers.1.mtp_norm.weight": "model.layers.3.shared_head.norm.weight",
        "mtp_layers.1.attention.wkv_a.weight": "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "mtp_layers.0.moe.expert_bias": "model.layers.2.mlp.gate.e_score_correction_bias",
    }.items():
        assert torch.equal(checkpoint.tensor(ours).load(), every[theirs])
    assert torch.equal(
        checkpoint.tensor("mtp_layers.1.moe.experts.w2").load()[4], every["model.layers.3.mlp.experts.4.down_proj.weight"]
    )
    assert run(tmp_path / "dcp", tmp_path / "back") == 0
    assert_bitwise(tensors_of(tmp_path / "back"), every)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert torch.equal(transformers_logits(tmp_path / "back"), logits)


def test_prediction_of_further_tokens_is_dropped(stored, tmp_path, capsys) -> None:
    source, checkpoint, _ = stored("deepseek_v3")
    every = predicting_further(source, tmp_path / "hf", 1)
    run(tmp_path / "hf", tmp_path / "whole")
    run(tmp_path / "hf", tmp_path / "dcp", "--drop-mtp")
    left_out = len(every) - len(tensors_of(source))
    assert f"left out the {left_out} tensors of the layers that predict further tokens" in capsys.readouterr().out
    assert Checkpoint(tmp_path / "dcp").stored.keys() == Checkpoint(checkpoint).stored.keys()
    assert json.loads((tmp_path / "dcp" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    run(tmp_path / "whole", tmp_path / "back", "--drop-mtp")
    assert_bitwise(tensors_of(tmp_path / "back"), tensors_of(source))
    with pytest.raises(InterchangeError, match="--drop-mtp: another dialect has the same tensors"):
        run(tmp_path / "whole", tmp_path / "other", "--dialect", "0.3.0", "--drop-mtp")


def test_prediction_with_a_head_of_its_own(stored, tmp_path) -> None:
    name = "model.layers.2.shared_head.head.weight"
    predicting_further(stored("deepseek_v3")[0], tmp_path / "hf", 1, **{name: torch.ones(VOCAB, 24)})
    with pytest.raises(InterchangeError, match=f"{name} is not lm_head.weight, which the model here shares; --drop-mtp"):
        run(tmp_path / "hf", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    assert run(tmp_path / "hf", tmp_path / "dcp", "--drop-mtp") == 0


def test_yarn_is_spoken_of(stored, tmp_path, capsys) -> None:
    for name, said in (("deepseek_v3", False), ("deepseek_v3, groups and yarn", True)):
        run(stored(name)[0], tmp_path / name)
        assert ("its YaRN applies in runs with training.seq_len over 16 alone" in capsys.readouterr().out) == said


def drop(name: str):
    def change(folder: Path) -> None:
        tensors = tensors_of(folder)
        del tensors[name]
        rewrite(folder, tensors)

    return change


def add(name: str, tensor: Tensor):
    return lambda folder: rewrite(folder, tensors_of(folder) | {name: tensor})


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-3])


def configured(**changes: object):
    return lambda folder: edit_config(folder, **changes)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", drop(Q_PROJ), f"lacks 1 tensors that its config.json calls for, first {Q_PROJ}"),
        (
            "qwen3_moe",
            add("model.layers.0.bias", torch.ones(2)),
            "holds 1 tensors that the model here lacks, first model.layers.0",
        ),
        ("qwen3_moe", add(Q_PROJ, torch.ones(24, 23)), r"holds layers.0.attention.wq.weight in shape \[24, 23\]"),
        ("qwen3_moe", add("model.layers.0.mlp.experts.2.up_proj.weight", torch.ones(3, 24)), "experts of .* differ in shape"),
        ("qwen3_moe", add(Q_PROJ, torch.ones(24, 24).to(torch.float8_e4m3fn)), "is FP8 without scales of blocks"),
        ("qwen3_moe", add(Q_PROJ, torch.ones(24, 24).int()), "is of type I32"),
        ("qwen3_moe", truncate, "model-00002-of-.*.safetensors: cannot be read"),
        ("qwen3_moe", lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), "model-00001-of-.* cannot be read"),
        ("qwen3_moe", lambda folder: (folder / "config.json").write_text("{"), "config.json: not readable as JSON"),
        ("qwen3_moe", lambda folder: (folder / "config.json").unlink(), "config.json: not readable as JSON"),
        ("qwen3_moe", configured(model_type="mamba"), "model_type = 'mamba'; can be converted: llama, qwen3"),
        ("qwen3_moe", configured(mlp_only_layers=[0]), r"mlp_only_layers = \[0\]: the model here computes \[\] alone"),
        ("qwen3_moe", configured(attention_bias=True), "attention_bias = True"),
        ("qwen3_moe", configured(rope_parameters=dict(rope_type="yarn", rope_theta=1.0)), "scaled by 'yarn'"),
        ("deepseek_v3", configured(rope_interleave=False), "rope_interleave = False"),
        ("deepseek_v3", configured(rope_parameters=dict(rope_type="yarn", rope_theta=1.0)), "YaRN without mscale"),
        ("llama", configured(head_dim=5), "head_dim = 5"),
    ],
)
def test_wrong_hugging_face_folders(stored, tmp_path, name, change, message) -> None:
    source = stored(name)[0]
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    with pytest.raises(InterchangeError, match=message):
        run(folder, tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_config_that_lacks_a_key(stored, tmp_path) -> None:
    source = stored("qwen3_moe")[0]
    rewrite_config = json.loads((source / "config.json").read_text())
    del rewrite_config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(rewrite_config))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InterchangeError, match="lacks 'hidden_size'"):
        run(tmp_path, tmp_path / "dcp")


def test_wrong_checkpoints(stored, tmp_path) -> None:
    _, checkpoint, _ = stored("qwen3_moe")
    whole = {key: Checkpoint(checkpoint).tensor(key).load() for key in Checkpoint(checkpoint).stored}
    for changed, message in (
        ({key: t for key, t in whole.items() if key != "norm.weight"}, "lacks 1 tensors of the qwen3 .* first norm.weight"),
        (whole | {"layers.2.ffn_norm.weight": torch.ones(24)}, "holds 1 entries that this qwen3 lacks, first layers.2.ffn_norm"),
        (whole | {"norm.weight": torch.ones(23)}, r"holds norm.weight in shape \[23\]"),
    ):
        folder = tmp_path / "dcp"
        dcp.save(changed, checkpoint_id=folder, no_dist=True)
        with pytest.raises(InterchangeError, match="what model this is stands nowhere"):
            run(folder, tmp_path / "hf")
        with pytest.raises(InterchangeError, match=message):
            run(folder, tmp_path / "hf", "--assets", checkpoint)
        for file in (*folder.iterdir(), folder / ".metadata"):
            file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("qk_norm = false", "qk_norm = false"),
        ("[model.overrides.moe_args]\nscore_func = 'sigmoid'", "moe_args.score_func = 'sigmoid'"),
        ("[model.overrides.moe_args]\nnum_shared_experts = 1", "moe_args.num_shared_experts = 1"),
    ],
)
def test_functions_that_hugging_face_lacks(tmp_path, overrides, message) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[model]\nname = 'qwen3'\nflavor = 'debugmodel_moe'\n[model.overrides]\n" + overrides)
    with pytest.raises(InterchangeError, match=message):
        config_from_args(*args_from_toml(toml))


@pytest.mark.parametrize("text", ["[model", "[model]\nname = 'qwen3'", "[model]\nname = 'qwen3'\nflavor = 'huge'"])
def test_wrong_configurations(stored, tmp_path, text) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(InterchangeError, match="run.toml"):
        run(stored("qwen3")[1], tmp_path / "hf", "--config", tmp_path / "run.toml")


def test_parts_that_are_missing(stored, tmp_path) -> None:
    """Metadata of a tensor whose chunks do not fill it."""
    folder = tmp_path / "dcp"
    shutil.copytree(stored("qwen3_moe")[1], folder)
    metadata = Checkpoint(folder).metadata
    metadata.state_dict_metadata["layers.0.moe.experts.w2"].chunks.pop(2)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InterchangeError, match="parts of layers.0.moe.experts.w2 are missing"):
        run(folder, tmp_path / "hf")


def test_options_without_effect_are_refused(stored, tmp_path) -> None:
    with pytest.raises(InterchangeError, match="--dtype = bfloat16: .* leave it out"):
        run(stored("qwen3")[1], tmp_path / "dcp", "--dialect", "0.3.0", "--dtype", "bfloat16")


def test_targets_that_exist_are_kept(stored, tmp_path) -> None:
    (tmp_path / "here").write_text("")
    for target in (tmp_path, tmp_path / "here"):
        with pytest.raises(InterchangeError, match="is there already; name a new folder"):
            run(stored("qwen3")[0], target)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_exit_code_and_message(tmp_path) -> None:
    command = [sys.executable, "-m", "moe_titan.convert", str(tmp_path / "nothing"), str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"{tmp_path}/nothing: neither a complete checkpoint (no .metadata) nor")
    assert "Traceback" not in result.stderr
