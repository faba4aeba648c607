"""The memory that states are copied into."""

from unittest.mock import patch

import torch

from moe_titan.checkpoint.staging import Staging


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
    with patch("torch.cuda.cudart", lambda: cudart), patch("torch.cuda.is_available", return_value=True):
        for elements, size in ((100, 448), (50, 448), (1000, 4032), (1000, 4032)):
            state = {"step": 3, "weight": torch.randn(elements)}
            copy = staging.copy(state)
            assert torch.equal(copy["weight"], state["weight"]) and copy["step"] == 3
            assert list(cudart.pinned.values()) == [size]
        del copy, staging
        assert not cudart.pinned
