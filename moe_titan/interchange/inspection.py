"""What a checkpoint or a Hugging Face folder holds, and what in it looks wrong."""

import hashlib
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moe_titan.interchange.dcp import RUN_STATE, Checkpoint
from moe_titan.interchange.manifest import Manifest, damage, read_manifest, recorded_files
from moe_titan.interchange.safetensors_folder import SafetensorsFolder, read_json
from moe_titan.interchange.stored_model import BIAS, format_of
from moe_titan.interchange.tensors import InterchangeError, Lazy

# Of a parameter's name, here and in Hugging Face's files; the first that fits.
_KINDS = [
    ("expert bias", r"\.expert_bias$|e_score_correction_bias$"),
    ("routed experts", r"\.moe\.experts\.|\.mlp\.experts\.\d+\."),
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.router\.|\.mlp\.gate\."),
    ("norm", r"norm\.weight$"),
    ("attention", r"\.attention\.|\.self_attn\."),
    ("dense feed-forward", r"\.feed_forward\.|\.mlp\."),
    ("embedding", r"^tok_embeddings|embed_tokens"),
    ("output", r"^output|^lm_head|\.shared_head\.head\."),
    ("joining projection", r"\.eh_proj\."),
]
_STACKED = re.compile(r"(.*\.moe)\.experts\.(w[123])$")
_SINGLE = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)\.weight$")


@dataclass
class Group:
    """Parameters of one kind and dtype."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass
class Report:
    """``facts`` in the order to show them; ``findings`` is what looks wrong, a line each."""

    facts: dict[str, str]
    groups: dict[tuple[str, str], Group] = field(default_factory=lambda: defaultdict(Group))
    findings: list[str] = field(default_factory=list)


def inspect(path: Path, values: bool) -> Report:
    """
    Args:
        values: read the tensors and look for NaN and infinity (in the optimizer's moments too), zeros and equal experts.

    Raises:
        InterchangeError: there is nothing to inspect, or it is damaged.
    """
    if format_of(path) == "hf":
        tensors, report = _open_hugging_face(path)
    else:
        tensors, report = _open_checkpoint(path, values)
    experts: dict[str, dict[int, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in tensors.items():
        group = report.groups[_kind(name), str(tensor.dtype).removeprefix("torch.")]
        size = torch.Size(tensor.shape).numel()
        group.tensors += 1
        group.elements += size
        group.bytes += size * tensor.dtype.itemsize
        if values:
            loaded = tensor.load()
            report.findings += _unsound(name, loaded)
            for layer, expert, digest in _expert_digests(name, loaded):
                experts[layer][expert].append(digest)
    report.findings += [finding for layer, digests in experts.items() for finding in _equal_experts(layer, digests)]
    return report


def _open_hugging_face(path: Path) -> tuple[dict[str, Lazy], Report]:
    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    folder = SafetensorsFolder(path, tuple(block) if block else None)
    facts = {"format": "Hugging Face", "model": config.get("model_type", "unknown")}
    if block:
        facts["quantized"] = f"FP8 in blocks of {block[0]} x {block[1]}, counted as dequantised"
    return {name: folder.tensor(name) for name in folder.names()}, Report(facts)


def _open_checkpoint(path: Path, values: bool) -> tuple[dict[str, Lazy], Report]:
    checkpoint, manifest = Checkpoint(path), read_manifest(path)
    facts = {"format": f"torch.distributed.checkpoint, keys of torchtitan {checkpoint.dialect}"}
    for key, fact in (("train_state.step", "step"), ("train_state.ntokens_seen", "tokens")):
        facts[fact] = str(checkpoint.value(key)) if key in checkpoint.stored else "not recorded (a model alone)"
    files = {info.relative_path for info in checkpoint.metadata.storage_data.values()}
    recorded = sorted(recorded_files(checkpoint.metadata, manifest).items())
    if problems := damage(path, recorded, checksums=values):
        raise InterchangeError("\n".join([f"{path} is damaged; use another checkpoint:", *problems]))
    writers = {match[1] for file in files if (match := re.match(r"__(\d+)_", file))}
    facts["written in"] = f"{len(files)} files by {len(writers)} writers"
    summed = manifest is not None and any(saved.crc32 is not None for saved in manifest.files.values())
    facts["checksums"] = "not recorded" if not summed else "right" if values else "not looked at"
    facts["layout"] = _layout(manifest, path.parent.parent / "config.toml")
    # Optimizer steps and the like are numbers, not parameters.
    keys = [key for key in checkpoint.tensor_keys() if not key.startswith(RUN_STATE) or key.startswith("optimizer.state.")]
    return {key: checkpoint.tensor(key) for key in keys if not key.endswith(".step")}, Report(facts)


def _layout(manifest: Manifest | None, toml: Path) -> str:
    """Degrees of the layout that saved it, which binds no one that loads it, or else of the run's present configuration."""
    if manifest is not None:
        return ", ".join(f"{dim} {degree}" for dim, degree in manifest.layout.items() if degree != 1) or "one rank"
    if not toml.exists():
        return "not recorded"
    degrees = {
        key.removesuffix("_degree"): value
        for key, value in tomllib.loads(toml.read_text()).get("parallelism", {}).items()
        if key.endswith("_degree") and value != 1
    }
    return ", ".join(f"{key} {value}" for key, value in degrees.items()) + f" ({toml})" if degrees else f"one rank ({toml})"


def _kind(name: str) -> str:
    if name.startswith("optimizer."):
        return "optimizer"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


def _unsound(name: str, tensor: Tensor) -> Iterator[str]:
    if bad := tensor.numel() - int(tensor.isfinite().sum()):
        yield f"{name}: {bad} of {tensor.numel()} values are NaN or infinite"
    starts_at_zero = name.startswith("optimizer.") or name.endswith((BIAS, "e_score_correction_bias"))
    if not starts_at_zero and tensor.numel() and not tensor.any():
        yield f"{name}: all zero"
    elif _STACKED.match(name) and (zero := [e for e in range(len(tensor)) if not tensor[e].any()]):
        yield f"{name}: all zero in expert{'s' if len(zero) > 1 else ''} {_listed(zero)}"


def _expert_digests(name: str, tensor: Tensor) -> Iterator[tuple[str, int, bytes]]:
    """Layer, expert and a digest of its part of a routed weight, for each expert that ``tensor`` holds."""
    if match := _STACKED.match(name):
        for expert, weight in enumerate(tensor):
            yield match[1], expert, _digest(match[2], weight)
    elif match := _SINGLE.match(name):
        yield match[1], int(match[2]), _digest(match[3], tensor)


def _digest(weight: str, tensor: Tensor) -> bytes:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, key=weight.encode(), digest_size=16).digest()


def _equal_experts(layer: str, digests: dict[int, list[bytes]]) -> Iterator[str]:
    alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for expert, own in sorted(digests.items()):
        alike[tuple(sorted(own))].append(expert)
    for experts in alike.values():
        if len(experts) > 1:
            yield f"{layer}: experts {_listed(experts)} are equal in all weights"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def render(report: Report, values: bool) -> str:
    """The report as text."""
    lines = [f"{name:<12}{value}" for name, value in report.facts.items()]
    row = "{:<20}{:<10}{:>9}{:>18}{:>14}".format
    lines += ["", row("kind", "dtype", "tensors", "elements", "MiB")]
    for (kind, dtype), group in sorted(report.groups.items()):
        lines.append(row(kind, dtype, group.tensors, f"{group.elements:,}", f"{group.bytes / 2**20:,.1f}"))
    model = [group for (kind, _), group in report.groups.items() if kind != "optimizer"]
    size = sum(group.bytes for group in model) / 2**20
    lines.append(row("model", "", sum(g.tensors for g in model), f"{sum(g.elements for g in model):,}", f"{size:,.1f}"))
    lines.append("")
    if not values:
        lines.append("values not looked at")
    elif report.findings:
        lines += [f"{len(report.findings)} findings:", *(f"  {finding}" for finding in report.findings)]
    else:
        lines.append("no NaN, no infinity, no tensor of zeros, no equal experts")
    return "\n".join(lines)
