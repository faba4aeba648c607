"""Rows turned for a weight gradient: by definition, by the kernel on threads against its reference; and compiled for Hopper."""

import re

import pytest
import torch
from gluon_compiled import Recorded, compiled_for_hopper
from gluon_threads import OnThreads, stored
from torch import Tensor

from kernels import group_pieces, packed_tokens, quantize, turn_rows, turn_rows_kernels

GROUPS = pytest.mark.parametrize("groups", [[0, 1, 7, 0, 129, 31, 127, 128], [40], [0, 0], [0, 300, 0], [700]], ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def ends_of(groups: list[int]) -> Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


def numbers(R: int, D: int) -> Tensor:
    """Rows of all sizes: one of zeros, and one with a huge outlier."""
    x_RD = torch.randn(R, D) * 10.0 ** torch.randint(-8, 8, (R, 1))
    x_RD[:1], x_RD[1:2, 0] = 0, 1e30
    return x_RD.bfloat16()


def quantized(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    return quantize.quantize_rows_reference(x_RD, False)


def same(actual: Tensor, expected: Tensor) -> bool:
    """In every bit; all NaN are the same."""
    a, b = actual.float(), expected.float()
    return actual.dtype == expected.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """What lies in the room for the groups, of which every element was stored once."""
    width = int(expected[2][-1])
    assert same(actual[2], expected[2]) and same(actual[0][:, :width], expected[0][:, :width])
    assert same(actual[1][: width // 128], expected[1][: width // 128])
    times = stored[actual[0].data_ptr()].view(actual[0].shape)
    assert (times[:, :width] == 1).all() and not times[:, width:].any()


@GROUPS
def test_elements_times_scales_are_the_rows(groups) -> None:
    """Exactly, but for what is smaller than 2^-14 of the largest number of its block."""
    x_RC = torch.randn(sum(groups), 48) * 10.0 ** torch.randint(-3, 3, (sum(groups), 1))
    elements_RC, scale_R = quantized(x_RC)
    turned_CW, scale_B, ends_E = turn_rows.turn_rows(elements_RC, scale_R, ends_of(groups))
    found, rows = (turned_CW.double() * scale_B.repeat_interleave(128)).t(), elements_RC.double() * scale_R[:, None]
    start, first = 0, 0
    for size, end in zip(groups, ends_E.tolist(), strict=True):
        assert end - start == max(-(-size // 128), 1) * 128 and not found[start + size : end].any()
        for block in range(0, size, 128):
            mine, wanted = (x[at + block : at + min(block + 128, size)] for x, at in ((found, start), (rows, first)))
            kept = wanted.abs() >= wanted.abs().max() * 2.0**-14
            assert torch.equal(mine[kept], wanted[kept]) and kept.any()
            assert ((mine - wanted).abs() <= wanted.abs().max() * 2.0**-18).all()
        start, first = end, first + size


@GROUPS
@pytest.mark.parametrize(("C", "choices", "again"), [(80, 0, False), (144, 0, True), (272, 3, False), (16, 1, False)])
def test_kernel_equals_reference(monkeypatch, groups, C, choices, again) -> None:
    """Rows of NaN, of zeros, past the last group, of tokens as they travel, and of numbers to be quantised again."""
    monkeypatch.setattr(turn_rows_kernels, "_turn_rows_kernel", OnThreads(turn_rows_kernels._turn_rows_kernel, 3))
    rows, ends = sum(groups), ends_of(groups)
    count = rows + 5
    x, pair_R = numbers(-(-count // choices) if choices else count, C), None
    if rows > 3:
        x[2, 5], x[3, 7] = torch.nan, torch.inf
    elements, scale = quantized(x)
    if choices:
        pair_R = torch.randperm(len(x) * choices)[:count].int()
        pair_R[rows:] = -1
        words = packed_tokens.pack_tokens(x, False)
        elements, scale = words.view(quantize.E4M3)[:, :C], words.view(torch.float32)[:, C // 4]
    else:
        elements[rows:], scale[rows:] = torch.full((5, C), torch.nan).to(quantize.E4M3), torch.nan
    actual = turn_rows.launch_turn_rows(x if again else elements, scale, ends, pair_R, choices)
    check(actual, turn_rows.turn_rows(elements, scale, ends, pair_R, choices or 1))


@pytest.mark.parametrize(("packed", "again"), [(False, False), (True, False), (False, True)])
def test_kernel_fits_a_multiprocessor(monkeypatch, tmp_path, packed, again) -> None:
    """Next to nothing spills, and four programs find room."""
    kernel, launched = turn_rows_kernels._turn_rows_kernel, Recorded()
    monkeypatch.setattr(turn_rows_kernels, "_turn_rows_kernel", launched)
    x = numbers(9, 256)
    elements, scale = quantized(x)
    turn_rows.launch_turn_rows(x if again else elements, scale, ends_of([4, 5]), torch.arange(9) if packed else None, 1)
    said = compiled_for_hopper(kernel, launched, tmp_path)[1]
    assert int(re.search(r"(\d+) bytes spill loads", said)[1]) <= (32 if again else 8)
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert 4 * 32 * group_pieces.WARPS.value * registers <= 65536


def test_no_ends_are_one_group_of_all_pairs() -> None:
    x, pair_R = torch.randn(4, 32).bfloat16(), torch.arange(8, dtype=torch.int32)
    for operator, operands in ((turn_rows.turn_rows, quantized(x)), (quantize.quantize_columns, (x,))):
        ways = [] if operator is turn_rows.turn_rows else [False]
        one, named = (operator(*operands, ends, *ways, pair_R, 2) for ends in (None, ends_of([8])))
        width = int(named[2][0])
        assert torch.equal(one[0][:, :width].float(), named[0][:, :width].float()) and torch.equal(one[2], named[2])
        assert named[0][:, 4:8].float().any()
