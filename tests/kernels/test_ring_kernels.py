"""The Gluon kernels as they are launched: run on threads, and compiled for Hopper."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gluon_compiled import Recorded, compiled_for_hopper
from gluon_threads import Descriptor, OnThreads, loaded, plain, stored
from torch import Tensor

from benchmarks.grouped_products import of_weight_grad
from kernels import grouped_mm, grouped_mm_fp8, grouped_mm_launch, quantize, ring_kernels

Case = tuple[Callable[[], Tensor], Tensor]  # Launches; what is to come out.


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def ends_of(groups: list[int]) -> Tensor:
    return torch.tensor(groups).cumsum(0, dtype=torch.int32)


def rows_of(groups: list[int], width: int) -> Tensor:
    """And some that are in no group."""
    x = bf16(sum(groups) + 5, width)
    x[sum(groups) :] = torch.nan
    return x


def output(groups: list[int], N: int, K: int) -> Case:
    R, ends, x_RK, w_EKN = sum(groups), ends_of(groups), rows_of(groups, K), bf16(len(groups), N, K).transpose(1, 2)
    expected = grouped_mm.grouped_mm_reference(x_RK.double(), w_EKN.double(), ends)[:R]
    return lambda: grouped_mm_launch.launch_grouped_mm(x_RK, w_EKN, ends)[:R], expected


def input_grad(groups: list[int], N: int, K: int) -> Case:
    R, ends, grad_RN, w_ENK = sum(groups), ends_of(groups), rows_of(groups, K), bf16(len(groups), K, N)
    expected = grouped_mm.grouped_mm_reference(grad_RN.double(), w_ENK.double(), ends)[:R]
    return lambda: grouped_mm_launch.launch_grouped_mm(grad_RN, w_ENK, ends)[:R], expected


def weight_grad(groups: list[int], N: int, K: int) -> Case:
    ends, grad_RN, x_RK = ends_of(groups), rows_of(groups, N), rows_of(groups, K)
    expected = grouped_mm.grouped_mm_weight_grad_reference(grad_RN.double(), x_RK.double(), ends)
    return lambda: grouped_mm_launch.launch_weight_grad(grad_RN, x_RK, ends), expected


def fp8(groups: list[int], N: int, K: int, blockwise: bool, transposed: bool) -> Case:
    R, ends, w = sum(groups), ends_of(groups), bf16(len(groups), *((K, N) if transposed else (N, K)))
    rows = quantize.quantize_rows(rows_of(groups, K), torch.tensor([R + 5]), blockwise)
    operands = *rows, *quantize.quantize_weights(w, blockwise, transposed), ends
    expected = grouped_mm_fp8.grouped_mm_fp8_reference(*operands, blockwise)[:R]
    if blockwise:
        return lambda: grouped_mm_launch.launch_grouped_mm_blockwise(*operands)[:R], expected
    a, a_scale, b, b_scale, _ = operands
    return lambda: grouped_mm_launch.launch_grouped_mm(a, b.transpose(1, 2), ends, a_scale, b_scale)[:R], expected


def fp8_weight_grad(groups: list[int], N: int, K: int, blockwise: bool) -> Case:
    grad_RN, x_RK = (rows_of(groups, width) * 10.0 ** torch.randint(-3, 3, (sum(groups) + 5, 1)) for width in (N, K))
    grad = of_weight_grad(grad_RN.bfloat16(), ends_of(groups), blockwise)[:2]
    operands = *grad, *of_weight_grad(x_RK.bfloat16(), ends_of(groups), blockwise)
    expected = grouped_mm_fp8.grouped_mm_fp8_weight_grad_reference(*operands, blockwise)
    return lambda: grouped_mm_launch.launch_weight_grad_fp8(*operands, blockwise), expected


def wide_weight_grad(groups: list[int], N: int, K: int, adds: bool) -> Case:
    """Of the head: gradients in E5M2, one group, in fp32."""
    ends, rows = ends_of([sum(groups)]), sum(groups)
    grad_NW, grad_scale, _ = of_weight_grad(bf16(rows, N), ends, False)
    operands = grad_NW.float().to(torch.float8_e5m2), grad_scale, *of_weight_grad(bf16(rows, K), ends, False)
    before_ENK = torch.randn(1, N, K)
    expected = grouped_mm_fp8._weight_grad_reference(*operands, False) + before_ENK * adds
    return lambda: grouped_mm_launch.launch_weight_grad_fp8(*operands, False, before_ENK.clone(), adds), expected


PRODUCTS: dict[str, tuple[str, Callable[[list[int], int, int], Case]]] = {
    "output": ("_grouped_mm_kernel", output),
    "input grad": ("_grouped_mm_kernel", input_grad),
    "weight grad": ("_weight_grad_kernel", weight_grad),
    "rowwise output": ("_grouped_mm_kernel", partial(fp8, blockwise=False, transposed=False)),
    "rowwise input grad": ("_grouped_mm_kernel", partial(fp8, blockwise=False, transposed=True)),
    "rowwise weight grad": ("_weight_grad_fp8_kernel", partial(fp8_weight_grad, blockwise=False)),
    "rowwise weight grad, wide": ("_weight_grad_fp8_kernel", partial(wide_weight_grad, adds=False)),
    "rowwise weight grad, added": ("_weight_grad_fp8_kernel", partial(wide_weight_grad, adds=True)),
    "blockwise output": ("_grouped_mm_blockwise_kernel", partial(fp8, blockwise=True, transposed=False)),
    "blockwise weight grad": ("_weight_grad_fp8_kernel", partial(fp8_weight_grad, blockwise=True)),
}
EVERY_KERNEL = pytest.mark.parametrize("product", PRODUCTS)


def replace(monkeypatch, product: str, stand_in: Callable) -> Any:
    """Has a product's launch, of 5 programs, find what ``stand_in`` makes of its kernel."""
    kernel = getattr(grouped_mm_launch, PRODUCTS[product][0])
    monkeypatch.setattr(grouped_mm_launch, PRODUCTS[product][0], stand_in(kernel))
    monkeypatch.setattr(grouped_mm_launch, "_grid", lambda device: (5,))
    return kernel


@EVERY_KERNEL
@pytest.mark.parametrize("groups", [[0, 1, 7, 127, 129, 200, 0], [64, 0, 65, 63, 128, 0], [300], [0, 0]], ids=str)
def test_kernels_on_threads(monkeypatch, product, groups) -> None:
    """Tiles and their steps, and who waits for whom: against the references, with fewer and more tiles than programs.

    Every number is stored once, also when some programs begin late, which find no tiles left. The counter is zero again after
    each of the launches that have the same one.
    """
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(grouped_mm_launch, "_descriptor", Descriptor)
    monkeypatch.setattr(grouped_mm_launch, "_counters", lambda device: itertools.repeat(counter))
    for N, K, at_once in (
        ((384, 128, 3), (128, 640, 5)) if "blockwise" in product else ((272, 208, 5), (144, 336, 3), (512, 128, 1))
    ):
        launch, expected = PRODUCTS[product][1](groups, N, K)
        with monkeypatch.context() as patch:
            replace(patch, product, partial(OnThreads, multiprocessors=at_once))
            out = launch()
        assert out.shape == expected.shape and bool(out.isfinite().all())
        error, size = (out.double() - expected).norm(dim=-1), expected.double().norm(dim=-1)
        assert (error <= (1e-6 if expected.dtype == torch.float32 and out.dtype == torch.float32 else 4e-3) * size).all()
        assert all(program < at_once for program in loaded) and not counter.any()
        if "added" in product:
            continue
        times = stored.get(out.data_ptr(), torch.ones(0))
        used = times.numel() * out.nbytes // out.untyped_storage().nbytes()
        assert bool(out.numel()) == bool(times.numel()) and (times[:used] == 1).all() and not times[used:].any()


@pytest.mark.parametrize("groups", [[0, 1, 7, 127, 129, 200, 0], [64, 0, 65, 63, 128, 0]], ids=str)
def test_weight_grad_beside_a_group_full_of_nan(monkeypatch, groups) -> None:
    """It harms no other, though steps read some of its rows."""
    monkeypatch.setattr(grouped_mm_launch, "_descriptor", Descriptor)
    monkeypatch.setattr(grouped_mm_launch, "_counters", lambda device: itertools.repeat(torch.zeros(1, dtype=torch.int32)))
    replace(monkeypatch, "weight grad", partial(OnThreads, multiprocessors=3))
    grad_RN, x_RK, ends = rows_of(groups, 136), rows_of(groups, 264), ends_of(groups)
    expected = grouped_mm_launch.launch_weight_grad(grad_RN, x_RK, ends)
    for e, (size, end) in enumerate(zip(groups, ends.tolist(), strict=True)):
        bad_grad_RN, bad_RK = grad_RN.clone(), x_RK.clone()
        bad_grad_RN[end - size : end], bad_RK[end - size : end] = torch.nan, torch.nan
        others = torch.arange(len(groups)) != e
        assert torch.equal(grouped_mm_launch.launch_weight_grad(bad_grad_RN, bad_RK, ends)[others], expected[others])


def test_weight_grad_of_no_rows(monkeypatch) -> None:
    """Where the last group's end is that of the memory: scales behind it are not read."""
    monkeypatch.setattr(grouped_mm_launch, "_descriptor", Descriptor)
    monkeypatch.setattr(grouped_mm_launch, "_counters", lambda device: itertools.repeat(torch.zeros(1, dtype=torch.int32)))
    replace(monkeypatch, "rowwise weight grad", partial(OnThreads, multiprocessors=3))
    (grad_NW, grad_scale, _), columns = (of_weight_grad(bf16(0, width), ends_of([0, 0]), False) for width in (144, 272))
    assert grad_NW.shape == (144, 256) and len(grad_scale) == 2
    assert not grouped_mm_launch.launch_weight_grad_fp8(grad_NW, grad_scale, *columns, False).any()


@pytest.mark.parametrize(
    "out", [torch.zeros(1, 32, 16).transpose(1, 2), torch.zeros(1, 16, 32).bfloat16(), torch.zeros(1, 16, 16)]
)
def test_a_sum_that_the_kernel_would_miss_is_refused(out) -> None:
    operands = *of_weight_grad(bf16(3, 16), ends_of([3]), False)[:2], *of_weight_grad(bf16(3, 32), ends_of([3]), False)
    with pytest.raises(ValueError, match=r"contiguous fp32 \(1, 16, 32\), not .*; copy it"):
        grouped_mm_launch.launch_weight_grad_fp8(*operands, False, out, True)


def test_numbers_are_handed_over_in_pairs() -> None:
    pair, halves_of = map(plain, (ring_kernels.pair, ring_kernels.halves_of))
    for upper, lower in ((0, 0), (300, 40000), (2**15 - 1, 2**16 - 1)):
        assert halves_of(pair(upper, lower)) == (upper, lower) and pair(upper, lower) < 2**31


def test_operands_that_do_not_fit_are_refused() -> None:
    x_RK, w_ENK, ends = bf16(8, 16), bf16(2, 24, 16), ends_of([3, 5])
    launch, weight_grad = grouped_mm_launch.launch_grouped_mm, grouped_mm_launch.launch_weight_grad
    with pytest.raises(ValueError, match="ends of 2 groups must be int32 .2., not torch.int64"):
        launch(x_RK, w_ENK.transpose(1, 2), ends.long())
    with pytest.raises(ValueError, match="ends of 2 groups must be int32 .2., not torch.int32 .1."):
        launch(x_RK, w_ENK.transpose(1, 2), ends[:1])
    with pytest.raises(ValueError, match="the same size where they meet, not 16 and 24"):
        launch(x_RK, w_ENK, ends)
    with pytest.raises(ValueError, match="multiples of 8, not {'K': 12}"):
        launch(x_RK[:, :12], w_ENK[:, :, :12].transpose(1, 2), ends)
    with pytest.raises(ValueError, match="the same size where they meet, not 8 and 7"):
        weight_grad(x_RK, x_RK[1:], ends)


def test_operands_are_copied_if_they_must() -> None:
    """One row of wider ones has their stride; another may begin anywhere. Weights that were turned lie in wider rows."""
    wide = bf16(4, 35)
    for x in (wide[:1, :32], wide[:, :32], wide.flatten()[1:129].view(4, 32), wide[:, :32].t()):
        copy = grouped_mm_launch._aligned(x)
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() % 16 == 0 and copy.stride(0) == x.shape[1]
    turned_EKN, _ = quantize.quantize_weights(bf16(3, 144, 64), False, True)
    assert not turned_EKN.is_contiguous()
    for x in (bf16(4, 40)[:, 8:], turned_EKN):
        assert grouped_mm_launch._aligned(x) is x


@EVERY_KERNEL
def test_kernels_fit_a_multiprocessor(monkeypatch, tmp_path, product) -> None:
    """Nothing spills, and no product waits for another without need."""
    launched = Recorded()
    kernel = replace(monkeypatch, product, lambda _: launched)
    launch, expected = PRODUCTS[product][1]([3, 130], 384, 256)
    out = launch()
    assert launched.grid == (5,) and out.shape == expected.shape
    assert out.dtype == (torch.float32 if product.endswith(("wide", "added")) else torch.bfloat16)
    compiled, said = compiled_for_hopper(kernel, launched, tmp_path)
    assert compiled.metadata.shared <= 227 * 1024
    assert 32 * compiled.metadata.num_warps * launched.options["maxnreg"] <= 65536
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert not [word for word in ("warning", "serialized", "injected") if word in said]
