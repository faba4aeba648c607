"""A model on a disk, in a Hugging Face folder or a checkpoint: the same tensors under the same keys, none of them read yet."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_titan.interchange.architectures import JsonObject, args_from_config, config_from_args
from moe_titan.interchange.dcp import Checkpoint, write_checkpoint
from moe_titan.interchange.flavors import args_from_toml, as_toml
from moe_titan.interchange.metadata import METADATA
from moe_titan.interchange.names import EMBEDDING, MTP, OUTPUT, layer_key, naming
from moe_titan.interchange.safetensors_folder import SafetensorsFolder, holds_safetensors, read_json, write_safetensors
from moe_titan.interchange.tensors import InterchangeError, Lazy, Parts, cast, shape_of

BIAS = ".moe.expert_bias"
ASSETS = (
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("generation_config.json", "*.model", "*.py", "LICENSE*"),
)
"""Files of a Hugging Face folder that are carried along beside its weights."""


@dataclass(frozen=True)
class StoredModel:
    """``tensors`` under torchtitan's keys, in the model's order; ``config`` is the config.json that it came with, if any.

    ``assets`` is a folder with the tokenizer's files, which may be missing. ``notes`` is what the user should hear.
    ``mtp_layers``: tokens that it predicts beyond the next.
    """

    name: str
    args: Any
    tensors: dict[str, Parts]
    config: JsonObject | None
    assets: Path
    notes: tuple[str, ...] = ()
    mtp_layers: int = 0


def format_of(path: Path) -> str:
    """``dcp`` or ``hf``.

    Raises:
        InterchangeError: neither is there.
    """
    if (path / METADATA).exists():
        return "dcp"
    if holds_safetensors(path):
        return "hf"
    raise InterchangeError(
        f"{path}: neither a complete checkpoint (no {METADATA}) nor a Hugging Face folder (no *.safetensors); give the folder "
        "of one step, such as outputs/checkpoint/step-1000, or of a downloaded model"
    )


def read_model(
    path: Path,
    toml: Path | None = None,
    assets: Path | None = None,
    dequantized: torch.dtype = torch.bfloat16,
    drop_mtp: bool = False,
) -> StoredModel:
    """The model that a folder of either format holds.

    Args:
        toml: configuration of the run that saved a checkpoint; by default, config.json in the checkpoint's folder, config.toml
            of the run it lies in, or config.json in ``assets``.
        assets: Hugging Face folder to take the tokenizer from, and config.json where nothing else says what model this is.
        dequantized: dtype that FP8 weights take.
        drop_mtp: leave out what predicts tokens beyond the next.

    Raises:
        InterchangeError: it is not whole, not of a known architecture, or not described.
    """
    if format_of(path) == "hf":
        return _read_hugging_face(path, dequantized, drop_mtp)
    return _read_checkpoint(path, toml, assets or path, drop_mtp)


def _read_hugging_face(path: Path, dequantized: torch.dtype, drop_mtp: bool) -> StoredModel:
    config = _read_config(path)
    name, args = args_from_config(config)
    block = (read_json(path / "config.json").get("quantization_config") or {}).get("weight_block_size")
    folder = SafetensorsFolder(path, tuple(block) if block else None, dequantized)
    stored = set(folder.names())
    predicting = {n for n in stored if (match := re.match(r"model\.layers\.(\d+)\.", n)) and int(match[1]) >= args.n_layers}
    mtp_layers = config.get("num_nextn_predict_layers", 0) if predicting and not drop_mtp else 0
    wanted = naming(name, args, mtp_layers)
    names = {key: [found] if isinstance(found, str) else found or [] for key, found in wanted.names.items()}
    if missing := sorted({n for group in names.values() for n in group} - stored):
        raise InterchangeError(f"{path} lacks {len(missing)} tensors that its config.json calls for, first {missing[0]}")
    unused = stored - {n for group in names.values() for n in group}
    left_out = predicting & unused - {n for group in wanted.copies.values() for n in group}
    # A tied output may be stored all the same; older files store a table of the rotary embedding.
    if unknown := sorted(n for n in unused - predicting - {"lm_head.weight"} if not n.endswith("rotary_emb.inv_freq")):
        raise InterchangeError(f"{path} holds {len(unknown)} tensors that the model here lacks, first {unknown[0]}")

    tensors: dict[str, Parts] = {}
    for key, shape in wanted.shapes.items():
        match wanted.names[key]:
            case list() as experts:
                tensors[key] = [folder.tensor(n) for n in experts]
            case str() as single:
                whole = _shared(path, folder, single, [n for n in wanted.copies.get(key, []) if n in stored])
                tensors[key] = _through(wanted.adapter.from_hf, single, layer_key(key, args), whole)
            case None if key == OUTPUT:
                tensors[key] = tensors[EMBEDDING]
            case None:
                tensors[key] = _zeros(shape)
    _check_tensors(path, tensors, wanted.shapes)
    if OUTPUT in tensors and wanted.names[OUTPUT] is None:
        # Beside the embedding, which it is, it is read only once.
        tensors = {EMBEDDING: tensors[EMBEDDING], OUTPUT: tensors[OUTPUT]} | tensors
    notes: tuple[str, ...] = (
        (f"left out the {len(left_out)} tensors of the layers that predict further tokens",) if left_out else ()
    )
    if name == "deepseek_v3" and args.max_seq_len > args.original_seq_len:
        notes += (f"its YaRN applies in runs with training.seq_len over {args.original_seq_len} alone",)
    return StoredModel(name, args, tensors, config, path, notes, mtp_layers)


def _read_checkpoint(path: Path, toml: Path | None, assets: Path, drop_mtp: bool) -> StoredModel:
    checkpoint = Checkpoint(path)
    config = _read_config(path) if (path / "config.json").exists() else None
    of_run = path.parent.parent / "config.toml"
    if toml is not None:
        name, args = args_from_toml(toml)
        config = None  # Another description than the run's.
    elif config is not None:
        name, args = args_from_config(config)
    elif of_run.exists():
        name, args = args_from_toml(of_run)
    elif (assets / "config.json").exists():
        config = _read_config(assets)
        name, args = args_from_config(config)
    else:
        raise InterchangeError(
            f"{path}: what model this is stands nowhere (no config.json in it, no {of_run}); give the run's configuration with "
            "--config, or a Hugging Face folder of the model with --assets"
        )
    keys = {key for key in checkpoint.model_keys() if not (drop_mtp and key.startswith(MTP))}
    mtp_layers = len({key.split(".")[1] for key in keys if key.startswith(MTP)})
    shapes = naming(name, args, mtp_layers).shapes
    if missing := sorted(key for key in shapes.keys() - keys if not key.endswith(BIAS)):
        raise InterchangeError(f"{path} lacks {len(missing)} tensors of the {name} that it should hold, first {missing[0]}")
    if unknown := sorted(keys - shapes.keys()):
        raise InterchangeError(f"{path} holds {len(unknown)} entries that this {name} lacks, first {unknown[0]}")
    tensors: dict[str, Parts] = {key: checkpoint.tensor(key) if key in keys else _zeros(shape) for key, shape in shapes.items()}
    _check_tensors(path, tensors, shapes)
    return StoredModel(name, args, tensors, config, assets, mtp_layers=mtp_layers)


def write_model(model: StoredModel, target: Path, dialect: str, dtype: torch.dtype | None) -> None:
    """As a checkpoint that a run starts from, with ``model.toml`` for its configuration and the assets beside it.

    Args:
        dtype: of all but the expert bias; by default as they are.
    """
    tensors = {key: cast(parts, _dtype_of(key, parts, dtype)) for key, parts in model.tensors.items()}
    with new_folder(target) as folder:
        write_checkpoint(folder, tensors, dialect)
        (folder / "model.toml").write_text(as_toml(model.name, model.args, model.mtp_layers))
        if model.config is not None:
            _write_config(_predicting_config(model, model.config), folder)
        _copy_assets(model.assets, folder)


def write_hugging_face(
    model: StoredModel, target: Path, shard_bytes: int, dtype: torch.dtype | None, drop_expert_bias: bool
) -> None:
    """As a Hugging Face folder: safetensors, config.json, and the assets.

    Args:
        shard_bytes: largest size of a file.
        dtype: of all but the expert bias; by default as they are.
        drop_expert_bias: leave it out where Hugging Face's model has none.

    Raises:
        InterchangeError: Hugging Face's model computes another function, as with an expert bias on Qwen3-MoE, or has no place for
            what predicts further tokens.
    """
    config = model.config
    if config is None:
        config = config_from_args(model.name, model.args) | _special_tokens(model.assets)
    wanted = naming(model.name, model.args, model.mtp_layers)
    tensors: dict[str, Lazy] = {}
    for key, parts in model.tensors.items():
        to = _dtype_of(key, parts, dtype)
        match wanted.names[key], parts:
            case list() as experts, _:
                # In this order, so that a stacked weight is read once.
                tensors |= {n: parts[expert].to(to) for expert, n in enumerate(experts)}
            case str() as single, Lazy() as whole:
                # Copies beside each other, so that it is read once.
                for n in (single, *wanted.copies.get(key, [])):
                    tensors[n] = _through(wanted.adapter.to_hf, layer_key(key, model.args), single, whole).to(to)
            case None, _ if key.startswith(MTP):
                raise InterchangeError(
                    f"{key} predicts further tokens, as Hugging Face's {model.name} never does; --drop-mtp leaves it out"
                )
            case None, Lazy() as whole if key.endswith(BIAS) and not drop_expert_bias and whole.load().any():
                raise InterchangeError(
                    f"{key} is not zero and Hugging Face's model has none; --drop-expert-bias leaves it out, and changes "
                    "which experts are chosen"
                )
    stored = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with new_folder(target) as folder:
        write_safetensors(folder, tensors, shard_bytes)
        _write_config(_predicting_config(model, config) | {"dtype" if "dtype" in config else "torch_dtype": stored}, folder)
        _copy_assets(model.assets, folder)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place once it is whole.

    Raises:
        InterchangeError: something is there, or it cannot be made.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InterchangeError(f"{target}: is there already; name a new folder")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise InterchangeError(f"{error.filename or target}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _through(convert: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str, becomes: str, tensor: Lazy) -> Lazy:
    """What a state-dict adapter makes of one tensor; none of them changes a shape."""
    return Lazy(tensor.shape, tensor.dtype, lambda: convert({name: tensor.load()})[becomes])


def _shared(path: Path, folder: SafetensorsFolder, name: str, copies: list[str]) -> Lazy:
    """A tensor that is stored several times and read once as one."""
    tensor = folder.tensor(name)

    def load() -> Tensor:
        whole = tensor.load()
        for copied in copies:
            if not torch.equal(folder.tensor(copied).load(), whole):
                raise InterchangeError(f"{path}: {copied} is not {name}, which the model here shares; --drop-mtp leaves it out")
        return whole

    return Lazy(tensor.shape, tensor.dtype, load) if copies else tensor


def _dtype_of(key: str, parts: Parts, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is written in; the bias of a choice between experts is kept from rounding."""
    return dtype if dtype is not None and not key.endswith(BIAS) else (parts[0] if isinstance(parts, list) else parts).dtype


def _zeros(shape: tuple[int, ...]) -> Lazy:
    return Lazy(shape, torch.float32, lambda: torch.zeros(shape))


def _check_tensors(path: Path, tensors: dict[str, Parts], shapes: dict[str, tuple[int, ...]]) -> None:
    for key, parts in tensors.items():
        if isinstance(parts, list) and len({(part.shape, part.dtype) for part in parts}) > 1:
            raise InterchangeError(f"{path}: the experts of {key} differ in shape or type")
        if shape_of(parts) != shapes[key]:
            raise InterchangeError(
                f"{path} holds {key} in shape {list(shape_of(parts))}, but by its description it is {list(shapes[key])}"
            )


def _read_config(path: Path) -> JsonObject:
    """config.json without what is true of the stored weights alone."""
    config = read_json(path / "config.json")
    config.pop("quantization_config", None)
    return config


def _predicting_config(model: StoredModel, config: JsonObject) -> JsonObject:
    """With the number of tokens that are predicted beyond the next, where the architecture has a key for it."""
    key = "num_nextn_predict_layers"
    return config | {key: model.mtp_layers} if key in config else config


def _special_tokens(assets: Path) -> JsonObject:
    if not (assets / "config.json").exists():
        return {}
    config = read_json(assets / "config.json")
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _write_config(config: JsonObject, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _copy_assets(source: Path, target: Path) -> None:
    for pattern in ASSETS:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
