"""The memory that states are copied into."""

from unittest.mock import patch

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
    succeeded = patch("torch.cuda.check_error", lambda code: None)
    with patch("torch.cuda.cudart", lambda: cudart), patch("torch.cuda.is_available", return_value=True), succeeded:
        for wanted, size in ((448, 448), (256, 448), (4032, 4032), (4032, 4032)):
            assert len(staging._block_of(wanted)) == size and list(cudart.pinned.values()) == [size]
        del staging
        assert not cudart.pinned
