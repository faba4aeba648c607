"""What ``moe.dispatcher = "auto"`` stands for, on machines that are only described here."""

import pytest
import torch

from parallelisms.dispatch import choice
from parallelisms.dispatch.choice import Place, choose_dispatcher, share_nvlink

CONNECTED = [Place("a", 0, [0, 18]), Place("a", 1, [18, 0])]
FOUR = [[0, 4, 4, 0], [4, 0, 4, 4], [4, 4, 0, 4], [0, 4, 4, 0]]  # 0 and 3 are not connected


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (CONNECTED, True),
        ([Place("a", 0, [0, 0]), Place("a", 1, [0, 0])], False),  # PCIe
        ([Place("a", 0, [0, 18]), Place("b", 1, [18, 0])], False),  # two hosts
        ([Place("a", 0, [18]), Place("a", 0, [18])], False),  # each process sees a GPU of its own only
        ([Place("a", index, FOUR[index]) for index in (0, 1, 2)], True),
        ([Place("a", index, FOUR[index]) for index in (2, 3, 1)], True),
        ([Place("a", index, FOUR[index]) for index in range(4)], False),
    ],
    ids=str,
)
def test_shared_nvlink(places, expected) -> None:
    assert share_nvlink(places) is expected


class FakeGroup:
    """Stands for a process group, of which the choice only asks where its ranks are."""


@pytest.mark.parametrize(
    ("cuda", "dtype", "places", "expected"),
    [
        (True, torch.bfloat16, CONNECTED, "nvlink"),
        (False, torch.bfloat16, CONNECTED, "alltoall"),
        (True, torch.float32, CONNECTED, "alltoall"),
        (True, torch.bfloat16, [Place("a", 0, [0, 0]), Place("b", 0, [0, 0])], "alltoall"),
    ],
    ids=str,
)
def test_choice(monkeypatch, cuda, dtype, places, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(choice, "_places", lambda group: places)
    assert choose_dispatcher(FakeGroup(), dtype) == expected
    assert choose_dispatcher(None, dtype) == "local"


def _gathered() -> list[Place]:
    choice._own_place = lambda: Place("a", torch.distributed.get_rank(), [1, 1])
    return choice._places(torch.distributed.group.WORLD)


def test_all_ranks_see_all_places(pool) -> None:
    assert pool.run(2, _gathered) == [[Place("a", 0, [1, 1]), Place("a", 1, [1, 1])]] * 2
