"""The kernels that quantise columns, run on threads, against their references; and compiled for Hopper."""

import re

import pytest
import torch
from gluon_compiled import Recorded, compiled_for_hopper
from gluon_threads import OnThreads, stored
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels import group_pieces, packed_tokens, quantize, quantize_columns_kernels

GROUPS = pytest.mark.parametrize("groups", [[0, 1, 7, 0, 129, 31, 127, 128], [40], [0, 0], [0, 300, 0]], ids=str)


def numbers(R: int, D: int) -> Tensor:
    """Rows of all sizes: one of zeros, one with a huge outlier, one with NaN and one with infinity."""
    x_RD = torch.randn(R, D) * 10.0 ** torch.randint(-8, 8, (R, 1))
    for i, value in enumerate((0.0, 1e30, torch.nan, torch.inf)):
        if R > i + 2:
            x_RD[i, 0 if i else slice(None)] = value
    return x_RD.bfloat16()


def same(actual: Tensor, expected: Tensor) -> bool:
    """In every bit; all NaN are the same."""
    a, b = actual.float(), expected.float()
    return actual.dtype == expected.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], blockwise: bool) -> None:
    """What lies in the room for the groups, of which every element was stored once."""
    width = int(expected[2][-1])
    blocks = width // 128 if blockwise else len(expected[2])
    assert same(actual[2], expected[2]) and same(actual[0][:, :width], expected[0][:, :width])
    assert same(actual[1][:blocks], expected[1][:blocks])
    times = stored[actual[0].data_ptr()].view(actual[0].shape)
    assert (times[:, :width] == 1).all() and not times[:, width:].any()


@pytest.fixture(autouse=True)
def _on_threads(monkeypatch) -> None:
    torch.manual_seed(0)
    kernel = quantize_columns_kernels._quantize_columns_kernel
    monkeypatch.setattr(quantize_columns_kernels, "_quantize_columns_kernel", OnThreads(kernel, 3))


@GROUPS
@pytest.mark.parametrize(("C", "blockwise", "choices"), [(80, False, 0), (48, True, 0), (16, False, 2), (128, True, 3)])
def test_columns(monkeypatch, groups, C, blockwise, choices) -> None:
    rows, ends = sum(groups), torch.tensor(groups).cumsum(0, dtype=torch.int32)
    count = rows + 5
    x, pair_R = numbers(-(-count // choices) if choices else count, C), None
    if choices:
        pair_R = torch.randperm(len(x) * choices)[:count].int()
        pair_R[rows:] = -1
    else:
        x[rows:] = torch.nan
    actual = quantize.launch_columns(x, ends, blockwise, pair_R, choices)
    check(actual, quantize.quantize_columns(x, ends, blockwise, pair_R, choices or 1), blockwise)


@pytest.mark.parametrize(
    ("ahead", "groups"), [(1, [129]), (1, [40, 500, 0]), (3, [700, 0, 1300]), (1000, [700, 0, 1300])], ids=str
)
def test_columns_are_turned_when_all_of_their_rows_are_measured(monkeypatch, ahead, groups) -> None:
    """In portions of a piece, of a group, and of all; most of their programs are under way at once."""
    monkeypatch.setattr(quantize_columns_kernels, "AHEAD", gl.constexpr(ahead))
    kernel = quantize_columns_kernels._quantize_columns_kernel.source
    monkeypatch.setattr(quantize_columns_kernels, "_quantize_columns_kernel", OnThreads(kernel, 8))
    x, ends = numbers(sum(groups), 150), torch.tensor(groups).cumsum(0, dtype=torch.int32)
    check(quantize.launch_columns(x, ends, False, None, 0), quantize.quantize_columns(x, ends, False), False)


@pytest.mark.parametrize("blockwise", [False, True])
def test_a_program_has_several_blocks(monkeypatch, blockwise) -> None:
    x, ends = numbers(2000, 64), torch.tensor([700, 700, 2000], dtype=torch.int32)
    check(quantize.launch_columns(x, ends, blockwise, None, 0), quantize.quantize_columns(x, ends, blockwise), blockwise)


@pytest.mark.parametrize(
    ("N", "D", "K", "groups"), [(9, 128, 2, [5, 0, 7]), (70, 384, 3, [1, 129, 0, 60]), (6, 256, 1, [2, 0, 3]), (1, 512, 4, [3])]
)
def test_columns_of_packed_tokens(N, D, K, groups) -> None:
    ends, pair_R = torch.tensor(groups).cumsum(0, dtype=torch.int32), torch.randperm(N * K)[: sum(groups) + 2].int()
    pair_R[sum(groups) :] = -1
    words = packed_tokens.pack_tokens(numbers(N, D), True)
    elements, scales = packed_tokens.elements_and_scales(packed_tokens.PackedTokens(words, D, True))
    actual = quantize.launch_columns(elements, ends, True, pair_R, K, scales)
    check(actual, packed_tokens.quantize_packed_columns(words, D, ends, pair_R, K), True)


@pytest.mark.parametrize(
    ("source", "blockwise"),
    [("rows", False), ("rows", True), ("tokens", False), ("tokens", True), ("packed tokens", True)],
)
def test_kernels_fit_a_multiprocessor(monkeypatch, tmp_path, source, blockwise) -> None:
    """Nothing spills, and three programs and more find room."""
    kernel, launched = quantize_columns_kernels._quantize_columns_kernel.source, Recorded()
    monkeypatch.setattr(quantize_columns_kernels, "_quantize_columns_kernel", launched)
    x, ends, pair_R = numbers(9, 256), torch.tensor([4, 9], dtype=torch.int32), None if source == "rows" else torch.arange(9)
    if source == "packed tokens":
        words = packed_tokens.pack_tokens(x, True)
        elements, scales = packed_tokens.elements_and_scales(packed_tokens.PackedTokens(words, 256, True))
        quantize.launch_columns(elements, ends, blockwise, pair_R, 1, scales)
    else:
        quantize.launch_columns(x, ends, blockwise, pair_R, 1)
    said = compiled_for_hopper(kernel, launched, tmp_path)[1]
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert 3 * 32 * group_pieces.WARPS.value * registers <= 65536
