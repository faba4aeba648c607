"""Ends of groups that the host knows."""

import pytest
import torch

from kernels.ends import equal_ends, one_group


@pytest.mark.parametrize(
    ("length", "end", "expected"), [(3, 9, [3, 6, 9]), (4, 9, [4, 8, 9]), (9, 9, [9]), (20, 9, [9]), (5, 0, [0])]
)
def test_equal_ends(length, end, expected) -> None:
    ends = equal_ends(length, end, torch.device("cpu"))
    assert ends.dtype == torch.int32 and ends.tolist() == expected
    assert equal_ends(length, end, torch.device("cpu")) is ends


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_one_group(rows) -> None:
    assert one_group(rows, torch.device("cpu")).tolist() == [rows]


def test_kept_ends_are_of_no_mode() -> None:
    with torch.inference_mode():
        ends = equal_ends(7, 77777, torch.device("cpu"))
    assert not ends.is_inference()
