"""What differs between a run's state and a checkpoint's, by name, shape and type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_titan.checkpoint.errors import CheckpointError
from moe_titan.interchange.dcp import RUN_STATE
from parallelisms.split_weights import Split

LISTED = 5


def check(state: Mapping[str, Any], saved: Mapping[str, Any], path: Path, whole: bool) -> None:
    """
    Args:
        state: what the run is to load. A ``saved`` one of the model or its moments that is not among it is one too many.
        whole: the run is to go on as it was, and not to begin with a model, which may have been exported in another type.

    Raises:
        CheckpointError: with a list of what differs.
    """
    _check_global_batch(state, saved, path)
    kinds = ("optimizer.state.",) if any(key.startswith("optimizer.state.") for key in state) else ()
    extra = [
        key
        for key in saved.keys() - state.keys()
        if isinstance(saved[key], TensorStorageMetadata) and (key.startswith(kinds) or not key.startswith(RUN_STATE))
    ]
    pairs = [
        (key, value, entry)
        for key, value in sorted(state.items())
        if isinstance(value, Tensor | Split) and isinstance(entry := saved.get(key), TensorStorageMetadata)
    ]
    differences = {
        "missing": sorted(state.keys() - saved.keys()),
        "unexpected": sorted(extra),
        "of another shape": [
            f"{key} {list(entry.size)} (needed: {list(value.shape)})" for key, value, entry in pairs if entry.size != value.shape
        ],
        "of another type": [
            f"{key} {_name(entry.properties.dtype)} (needed: {_name(value.dtype)})"
            for key, value, entry in pairs
            if whole and entry.properties.dtype != value.dtype
        ],
    }
    lines = [f"  {len(items)} {what}: {_listed(items)}" for what, items in differences.items() if items]
    if lines:
        cure = "check model.name, model.flavor, model.overrides, mtp.num_layers and training.dtype"
        if whole:
            cure += ", or leave a part out with checkpoint.exclude_from_loading"
        raise CheckpointError("\n".join([f"{path} does not hold the {len(state)} entries that this run loads:", *lines, cure]))


def _check_global_batch(state: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    key = "dataloader.position"
    if key not in state or not isinstance(entry := saved.get(key), TensorStorageMetadata):
        return
    ours, theirs = len(state[key]), entry.size[0]
    if ours != theirs:
        raise CheckpointError(
            f"training.global_batch_size = {ours}: the data position in {path} is of a run with {theirs}, and "
            f'continues with no other; set training.global_batch_size = {theirs}, or add "dataloader" to '
            "checkpoint.exclude_from_loading to read the data from its start"
        )


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
