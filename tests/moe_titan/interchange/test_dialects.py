"""Whole checkpoints under the keys of torchtitan 0.3.0 and back."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from moe_titan import convert
from moe_titan.interchange import InterchangeError
from moe_titan.interchange.dcp import Checkpoint
from moe_titan.interchange.dialects import dialect_of, to_dialect
from moe_titan.interchange.manifest import MANIFEST, Manifest, checksum, read_manifest

MOE = {
    "output.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
    "layers.1.moe.experts.w1": "layers.1.moe.routed_experts.inner_experts.w1_EFD",
    "layers.1.moe.experts.w2": "layers.1.moe.routed_experts.inner_experts.w2_EDF",
    "layers.1.moe.experts.w3": "layers.1.moe.routed_experts.inner_experts.w3_EFD",
    "layers.1.moe.shared_experts.w1.weight": "layers.1.moe.shared_experts.w1.weight",
    "layers.1.moe.router.gate.weight": "layers.1.moe.router.gate.weight",
    "layers.1.moe.expert_bias": "layers.1.moe.expert_bias_E",
    "mtp_layers.0.eh_proj.weight": "mtp_layers.0.eh_proj.weight",
    "mtp_layers.0.moe.experts.w1": "mtp_layers.0.moe.routed_experts.inner_experts.w1_EFD",
    "mtp_layers.0.moe.expert_bias": "mtp_layers.0.moe.expert_bias_E",
}
GROUPED = {
    **{f"layers.1.attention.{w}.weight": f"layers.1.attention.qkv_linear.{w}.weight" for w in ("wq", "wk", "wv")},
    "layers.1.attention.wo.weight": "layers.1.attention.wo.weight",
}
LATENT = {key: key for key in ("layers.1.attention.wq.weight", "layers.1.attention.wkv_a.weight", "layers.1.attention.wo.weight")}


def state_of(names: dict[str, str]) -> dict:
    """As torchtitan nests it: the model's keys on top, the optimizer's hold them."""
    model = {key: torch.randn(3, 2) for key in names}
    moments = {f"state.{key}.exp_avg": torch.randn(3, 2) for key in names if not key.endswith("bias")}
    settings = {f"param_groups.{key}.lr": 0.1 for key in names}
    data = {"dp_rank_0": pickle.dumps({"position": 3}), "world_size": 1}
    return model | {"optimizer": moments | settings, "train_state": {"step": torch.tensor(7)}, "dataloader": data}


@pytest.mark.parametrize("attention", [GROUPED, LATENT], ids=["grouped queries", "latent"])
def test_there_and_back(tmp_path, attention) -> None:
    names = MOE | attention
    state = state_of(names)
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    for source, target, dialect in (("old", "new", "0.3.0"), ("new", "back", "0.2.2")):
        assert convert.main([str(tmp_path / source), str(tmp_path / target), "--dialect", dialect]) == 0
    assert (Checkpoint(tmp_path / "old").dialect, Checkpoint(tmp_path / "new").dialect) == ("0.2.2", "0.3.0")

    flat, paths = flatten_state_dict(state)
    renamed = {names.get(key, key): value for key, value in flat.items() if not key.startswith("optimizer.")}
    for old, new in names.items():
        for key in ("optimizer.state.{}.exp_avg", "optimizer.param_groups.{}.lr"):
            if key.format(old) in flat:
                renamed[key.format(new)] = flat[key.format(old)]
    assert_loads(tmp_path / "new", renamed)
    assert_loads(tmp_path / "back", flat)
    old, back = Checkpoint(tmp_path / "old").metadata, Checkpoint(tmp_path / "back").metadata
    assert (old.state_dict_metadata, old.storage_data, old.planner_data) == (
        back.state_dict_metadata,
        back.storage_data,
        back.planner_data,
    )
    assert Checkpoint(tmp_path / "new").metadata.planner_data.keys() == renamed.keys()


def test_the_manifest_is_of_the_new_files(tmp_path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    dcp.save({"output.weight": torch.ones(2)}, checkpoint_id=old, no_dist=True)
    Manifest({"tp": 2}, {file.name: checksum(file) for file in old.iterdir()}).write(old)
    assert convert.main([str(old), str(new), "--dialect", "0.3.0"]) == 0
    files = {file.name: checksum(file) for file in new.iterdir() if file.name != MANIFEST}
    assert read_manifest(new) == Manifest({"tp": 2}, files)
    assert read_manifest(old).files[".metadata"] != files[".metadata"]


def assert_loads(folder: Path, expected: dict) -> None:
    """Stock DCP finds these keys with these values."""
    state = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in expected.items()}
    assert dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == expected.keys()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for key, value in expected.items():
        assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value, key


def test_names_are_seen_through() -> None:
    """A checkpoint reads the same in either dialect."""
    for names in (MOE | GROUPED, MOE | LATENT):
        assert to_dialect(names.values(), "0.2.2") == {new: old for old, new in names.items()}
        assert to_dialect(names, "0.2.2") == {old: old for old in names}
        assert to_dialect(names, "0.3.0") == to_dialect(dict.fromkeys(names), "0.3.0") == names
        assert (dialect_of(names), dialect_of(names.values())) == ("0.2.2", "0.3.0")


def test_the_same_dialect_and_a_lost_file_are_refused(tmp_path) -> None:
    dcp.save({"output.weight": torch.ones(2)}, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(InterchangeError, match="has the keys of torchtitan 0.2.2 already"):
        convert.main([str(tmp_path / "old"), str(tmp_path / "new"), "--dialect", "0.2.2"])
    (tmp_path / "old" / "__0_0.distcp").unlink()
    with pytest.raises(InterchangeError, match="__0_0.distcp: is missing"):
        convert.main([str(tmp_path / "old"), str(tmp_path / "new"), "--dialect", "0.3.0"])
    assert not (tmp_path / "new").exists()
