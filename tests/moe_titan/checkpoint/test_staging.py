"""The memory that states are copied into, and what a save needs besides."""

import weakref
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moe_titan.checkpoint.deferred import Deferred, SavePlanner
from moe_titan.checkpoint.staging import Staging
from moe_titan.checkpoint.writer import Writer


class Cudart:
    """Registers memory in a set; what is not pinned cannot be unpinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert pointer not in self.pinned and not flags
        self.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


def test_memory_is_pinned_no_longer_than_it_is_kept() -> None:
    staging, cudart = Staging(keep=True), Cudart()
    succeeded = patch("torch.cuda.check_error", lambda code: None)
    with patch("torch.cuda.cudart", lambda: cudart), patch("torch.cuda.is_available", return_value=True), succeeded:
        for wanted, size in ((448, 448), (256, 448), (4032, 4032), (4032, 4032)):
            assert len(staging._block_of(wanted)) == size and list(cudart.pinned.values()) == [size]
        del staging
        assert not cudart.pinned


def test_copies_have_memory_of_their_own() -> None:
    """In one block; the writer would copy views of it once more."""
    state = {
        "weight": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "nothing": torch.empty(0, 4),
        "step": torch.tensor(3),
        "name": "no tensor",
    }
    staging = Staging(keep=True)
    staged = staging.copy(state)
    staging.wait()
    begin = staging._block.data_ptr()
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            assert staged[key] == tensor
            continue
        assert torch.equal(staged[key], tensor) and staged[key].dtype == tensor.dtype and staged[key].is_contiguous()
        assert staged[key].untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.nbytes or begin <= staged[key].data_ptr() < begin + len(staging._block)


def test_what_is_made_for_a_save_is_not_held(tmp_path) -> None:
    """Neither tensors that are made when they are written, nor copies of views, of which there is one at a time."""
    whole, made, held = torch.randn(12, 1000), [], []

    def make() -> Tensor:
        held.append(sum(ref() is not None for ref in made))
        tensor = torch.full((1000,), float(len(made)))
        made.append(weakref.ref(tensor))
        return tensor

    state = {f"made{n}": Deferred(whole[n], torch.float32, make) for n in range(6)}
    state |= {f"view{n}": whole[n + 6] for n in range(6)}
    planner = SavePlanner(state)
    writer = Writer(tmp_path / "step", {}, checksums=True, commit=lambda: None)
    with patch.object(Tensor, "clone", side_effect=AssertionError("copied once more")):
        dcp.save(planner.state, storage_writer=writer, planner=planner, no_dist=True)
    assert len(made) == 6 and max(held) <= 1 and len(planner._scratch) == 1
    wanted = {key: torch.zeros(1000) for key in state}
    dcp.load(wanted, checkpoint_id=tmp_path / "step", no_dist=True)
    assert all(torch.equal(wanted[f"view{n}"], whole[n + 6]) for n in range(6))
    assert sorted(int(wanted[f"made{n}"][0]) for n in range(6)) == list(range(6))
