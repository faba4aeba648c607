"""FP8 on Hopper: every kernel against its reference in poisoned memory, and the experts against the emulated recipe."""

from functools import partial

import float8_rows
import pytest
import torch
from torch import Tensor, nn

from benchmarks.grouped_products import of_weight_grad
from benchmarks.moe_layer import relative_error
from float8.emulation import EmulatedLinear
from float8.experts import EmulatedProducts, Float8Products
from float8.head import EmulatedHead, RowwiseHead
from float8.kernel_linear import KernelLinear
from float8.recipes import RECIPES
from kernels import cross_entropy_fp8, grouped_mm_fp8, packed_tokens, quantize, swiglu_fp8, turn_rows
from kernels.cross_entropy import linear_cross_entropy_sums

GROUPS = [1, 0, 7, 127, 129, 16, 0, 300, 513]
RECIPE = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
# Tensor cores keep 14 bits of a sum with a scale a row; the result is rounded to bf16.
PRODUCT = 4e-3


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def numbers(R: int, D: int) -> Tensor:
    """Rows of all sizes: one of zeros, one with a huge outlier, one with NaN and one with infinity."""
    x_RD = torch.randn(R, D, device="cuda") * 10.0 ** torch.randint(-8, 8, (R, 1), device="cuda")
    x_RD[0], x_RD[1, 3], x_RD[2, 5], x_RD[3, 7] = 0, 1e30, torch.nan, torch.inf
    return x_RD.bfloat16()


def ends_of(groups: list[int]) -> Tensor:
    return torch.tensor(groups, device="cuda").cumsum(0, dtype=torch.int32)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit for bit; all NaN are the same."""
    return torch.equal(actual.float().nan_to_num(9e9), expected.float().nan_to_num(9e9).to(actual.device))


def cpu(*values):
    return (value.cpu() if isinstance(value, Tensor) else value for value in values)


@RECIPE
@pytest.mark.parametrize("D", [384, 2048, 7168])
def test_packed_tokens(poisoned, recipe, D) -> None:
    blockwise, R, K = recipe == "blockwise", sum(GROUPS), 3
    N, ends = R // 2, ends_of(GROUPS)
    x_ND = numbers(N, D + 8)[:, :D]
    words, wanted = poisoned(packed_tokens.pack_tokens, x_ND, blockwise), packed_tokens.pack_tokens(x_ND.cpu(), blockwise)
    for part, dtype in (
        (slice(0, D // 4), quantize.E4M3),
        (slice(D // 4, D // 4 + packed_tokens.scales_of_token(D, blockwise)), torch.float32),
    ):
        assert same(*(each[:, part].contiguous().view(dtype) for each in (words, wanted)))
    pair_R = torch.randperm(N * K, device="cuda")[:R].int()
    row_P = torch.full((N * K,), -1, device="cuda", dtype=torch.int32)
    row_P[pair_R.long()] = torch.arange(R, device="cuda", dtype=torch.int32)
    row_NK = row_P.view(N, K)
    actual = poisoned(packed_tokens.spread_packed, words, row_NK, R, D, blockwise)
    for part, expected in zip(actual, quantize.spread_rows_fp8(x_ND, row_NK, R, blockwise), strict=True):
        assert same(part, expected)
    elements, scale = packed_tokens.elements_and_scales(packed_tokens.PackedTokens(words, D, blockwise))
    operator, arguments = (
        (packed_tokens.quantize_packed_columns, (words, D, ends, pair_R, K))
        if blockwise
        else (turn_rows.turn_rows, (elements, scale, ends, pair_R, K))
    )
    same_columns(poisoned(operator, *arguments), operator(*cpu(*arguments)))


def same_columns(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """What lies in the room for the groups, with scales for a block of 128."""
    width = int(wanted[2][-1])
    assert same(actual[0][:, :width], wanted[0][:, :width]) and same(actual[2], wanted[2])
    assert same(actual[1][: width // 128], wanted[1][: width // 128])


@pytest.mark.parametrize("C", [16, 768, 2048, 2816])
@pytest.mark.parametrize("groups", [GROUPS, [0, 0], [64] * 300])
def test_turned_rows(poisoned, C, groups) -> None:
    R, ends = sum(groups), ends_of(groups)
    x = numbers(R + 5, C)
    elements, scale = quantize.quantize_rows(x, torch.tensor([R + 5], device="cuda"), False)
    wanted = turn_rows.turn_rows(*cpu(elements, scale, ends))
    for source in (elements, x):
        same_columns(poisoned(turn_rows.turn_rows, source, scale, ends), wanted)


@RECIPE
@pytest.mark.parametrize("D", [384, 2048, 7168])
def test_quantisers(poisoned, recipe, D) -> None:
    blockwise, R = recipe == "blockwise", sum(GROUPS)
    x_RD, ends = numbers(R + 5, D), ends_of(GROUPS)
    row_NK = torch.randperm(2 * (R + 5), device="cuda").int().view(-1, 2)
    for operator, arguments, used in (
        (quantize.quantize_rows, (x_RD, ends[-1:], blockwise), R),
        (quantize.spread_rows_fp8, (x_RD, row_NK, 2 * (R + 5), blockwise), 2 * (R + 5)),
    ):
        (elements, scale), (wanted, wanted_scale) = poisoned(operator, *arguments), operator(*cpu(*arguments))
        assert same(elements[:used], wanted[:used]) and same(scale[..., :used], wanted_scale[..., :used])
    pair_R = torch.randperm(2 * (R + 5), device="cuda")[:R].int()
    for gathered in ((), (pair_R, 2)):
        arguments = x_RD, ends, blockwise, *gathered
        actual, wanted = poisoned(quantize.quantize_columns, *arguments), quantize.quantize_columns(*cpu(*arguments))
        used = int(wanted[2][-1])
        assert same(actual[0][:, :used], wanted[0][:, :used]) and same(actual[2], wanted[2])
        blocks = used // 128 if blockwise else len(GROUPS)
        assert same(actual[1][:blocks], wanted[1][:blocks])
    w_ENK = numbers(3 * 256, D).view(3, 256, D)
    for transposed in (False, True):
        arguments = w_ENK, blockwise, transposed
        assert all(map(same, poisoned(quantize.quantize_weights, *arguments), quantize.quantize_weights(*cpu(*arguments))))


@RECIPE
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [128, 768, 1408, 2048])
def test_swiglu(poisoned, recipe, packed, width) -> None:
    R, blockwise = 333, recipe == "blockwise"
    gate_up_R2F, grad_RF, weights_P = randn(R, 2, width), randn(R, width), torch.rand(2 * R, device="cuda")
    pair_R, count = torch.randperm(2 * R, device="cuda")[:R].int(), torch.tensor([R - 4], device="cuda")
    gate_up_R2F[R - 4 :], grad_RF[R - 4 :] = torch.nan, torch.nan
    arguments, used = (gate_up_R2F, weights_P, pair_R, count, blockwise), slice(0, R - 4)
    actual, wanted = poisoned(swiglu_fp8.weighted_swiglu_fp8, *arguments), swiglu_fp8.weighted_swiglu_fp8(*cpu(*arguments))
    assert (actual[0][used].cpu().float() != wanted[0][used].float()).double().mean() < 5e-3
    if packed:
        arguments = poisoned(packed_tokens.pack_tokens, gate_up_R2F.flatten(1), blockwise, count), *arguments[1:]
    actual = poisoned(swiglu_fp8.weighted_swiglu_fp8_backward, grad_RF, *arguments)
    wanted = swiglu_fp8.weighted_swiglu_fp8_backward(*cpu(grad_RF, *arguments))
    for output, rows in ((0, R - 4), (3, 2 * R), (4, R - 4)):
        assert relative_error(actual[output][:rows].cpu(), wanted[output][:rows]) < 2e-3
    elements, scale = quantize.quantize_rows(actual[0].flatten(1), count, blockwise)
    assert same(actual[1][used], elements[used]) and same(actual[2][..., used], scale[..., used])
    if not blockwise:
        own = poisoned(swiglu_fp8.weighted_swiglu_rowwise_backward, grad_RF, *arguments[:-1])
        for mine, wanted in ((own[:2], (elements, scale)), (own[3:], quantize.quantize_rows(actual[4], count, False))):
            for part, expected in zip(mine, wanted, strict=True):  # up to roundings to bf16
                assert (part[used].float() != expected[used].float()).double().mean() < 5e-3
        assert relative_error(own[2], actual[3]) < 1e-5


@RECIPE
@pytest.mark.parametrize(("N", "K"), [(384, 256), (1408, 2048), (2048, 7168)])
def test_products(poisoned, recipe, N, K) -> None:
    blockwise, ends, R = recipe == "blockwise", ends_of(GROUPS), sum(GROUPS)
    a_RK, grad_RN, w_ENK = randn(R + 5, K), randn(R + 5, N), randn(len(GROUPS), N, K)
    a_RK[R:], grad_RN[R:] = 1e4, torch.nan
    for x, transposed in ((a_RK, False), (grad_RN, True)):
        operands = (
            *quantize.quantize_rows(x, ends[-1:], blockwise),
            *quantize.quantize_weights(w_ENK, blockwise, transposed),
            ends,
        )
        expected = grouped_mm_fp8.grouped_mm_fp8_reference(*operands, blockwise)[:R]
        assert relative_error(poisoned(grouped_mm_fp8.grouped_mm_fp8, *operands, blockwise)[:R], expected) < PRODUCT
    operands = *of_weight_grad(grad_RN, ends, blockwise)[:2], *of_weight_grad(a_RK, ends, blockwise)
    expected = grouped_mm_fp8.grouped_mm_fp8_weight_grad_reference(*operands, blockwise)
    actual = poisoned(grouped_mm_fp8.grouped_mm_fp8_weight_grad, *operands, blockwise)
    assert relative_error(actual, expected) < PRODUCT and not actual[1].any()


@RECIPE
@pytest.mark.parametrize(("N", "K"), [(512, 2048), (2816, 2048), (4096, 512)])
@pytest.mark.parametrize("rows", [0, 1, 1000, 16384])
def test_weight_grad_in_parts(poisoned, recipe, N, K, rows) -> None:
    blockwise, ends = recipe == "blockwise", ends_of([rows])
    grad_NW, grad_scale, end = of_weight_grad(randn(rows, N), ends, blockwise)
    a_KW, a_scale, _ = of_weight_grad(randn(rows, K), ends, blockwise)
    operands = grad_NW, grad_scale, a_KW, a_scale
    actual = poisoned(grouped_mm_fp8.mm_fp8_weight_grad, *operands, rows, blockwise)
    expected = grouped_mm_fp8.grouped_mm_fp8_weight_grad_reference(*operands, end, blockwise)[0]
    assert relative_error(actual, expected) < PRODUCT if rows else not actual.any()


@pytest.mark.parametrize(("N", "K"), [(384, 256), (144, 80), (1040, 2048)])
@pytest.mark.parametrize("rows", [0, 1, 1000, 3277])
def test_weight_grad_added_to_a_sum(N, K, rows) -> None:
    """Of gradients in E5M2, in fp32 but for what tensor cores keep of 128 rows, and the same bits again."""
    ends = ends_of([rows])
    grad_NW, grad_scale, end = of_weight_grad(randn(rows, N), ends, False)
    operands = grad_NW.float().to(torch.float8_e5m2), grad_scale, *of_weight_grad(randn(rows, K), ends, False)[:2]
    before_NK = torch.randn(N, K, device="cuda")
    sums = [before_NK.clone() for _ in range(2)]
    for sum_NK in sums:
        grouped_mm_fp8.mm_fp8_weight_grad_(sum_NK, *operands, rows, True)
    alone_NK = grouped_mm_fp8._weight_grad_reference(*operands, end, False)[0]
    assert torch.equal(*sums) and relative_error(sums[0], before_NK + alone_NK) < 1e-3
    grouped_mm_fp8.mm_fp8_weight_grad_(sums[0], *operands, rows, False)
    assert relative_error(sums[0], alone_NK) < 1e-3 if rows else not sums[0].any()


@pytest.mark.parametrize(("T", "V", "first"), [(333, 4112, 0), (128, 151936, 0), (1, 16, 16), (0, 128, 0)])
def test_gradients_of_logits(poisoned, T, V, first) -> None:
    logits_TV, labels_T, grad_T = 3 * randn(T, V + 16)[:, :V], torch.randint(first, first + V, (T,)), torch.rand(T)
    if T > 2:
        labels_T[0], labels_T[1], grad_T[2] = -100, first + V, 0
    lse_T, factor_T = logits_TV.float().logsumexp(1).cpu(), 2.0 ** torch.randint(6, 11, (T,))
    arguments = logits_TV, labels_T.cuda(), lse_T.cuda(), grad_T.cuda(), first, factor_T.cuda(), torch.tensor([32768.0]).cuda()
    actual = poisoned(cross_entropy_fp8.cross_entropy_backward_fp8, *arguments)
    for mine, wanted in zip(actual, cross_entropy_fp8.cross_entropy_backward_fp8(*cpu(*arguments)), strict=True):
        assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
        if T:  # the exponential's last bit moves what is half-way between two
            assert (mine.cpu().float() != wanted.float()).double().mean() < 5e-3
            assert relative_error(mine.cpu().float(), wanted.float()) < 5e-3


def worst_row(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error of a row; rows of zeros are to be equal."""
    assert actual.shape == expected.shape
    error, size = (x.double().norm(dim=-1) for x in (actual.double() - expected, expected))
    return error.where(size == 0, error / size).max().item()


@pytest.mark.parametrize(
    ("recipe", "N", "K"),
    [(recipe, *sizes) for recipe in ("blockwise", "rowwise") for sizes in ((128, 384), (640, 128), (384, 2048))]
    + [("rowwise", 144, 80), ("rowwise", 16, 1936), ("rowwise", 1040, 336)],
)
@pytest.mark.parametrize("groups", [[0, 1, 7, 0, 127, 129, 1000, 0], [1], [64] * 300, [0, 0]])
def test_tiles(poisoned, recipe, N, K, groups) -> None:
    """Whole and cut tiles of rows and columns, and more and fewer tiles than programs; rows past the last group are NaN."""
    # One rounding to bf16; what tensor cores cut off a longer sum may be a larger share of a short row.
    blockwise, of_output = recipe == "blockwise", 2.0**-8 if recipe == "blockwise" else 1e-2
    R, ends = sum(groups), ends_of(groups)
    x_RK, grad_RN, w_ENK = randn(R + 5, K), randn(R + 5, N), randn(len(groups), N, K)
    x_RK *= 10.0 ** torch.randint(-3, 3, (R + 5, 1), device="cuda")
    x_RK[R:], grad_RN[R:] = torch.nan, torch.nan
    for rows, transposed in ((x_RK, False), (grad_RN, True)):
        quantized = quantize.quantize_rows(rows, torch.tensor([R + 5], device="cuda"), blockwise)
        operands = *quantized, *quantize.quantize_weights(w_ENK, blockwise, transposed), ends
        actual = poisoned(grouped_mm_fp8.grouped_mm_fp8, *operands, blockwise)[:R]
        assert not R or worst_row(actual, grouped_mm_fp8.grouped_mm_fp8_reference(*operands, blockwise)[:R]) < of_output
    operands = *of_weight_grad(grad_RN, ends, blockwise)[:2], *of_weight_grad(x_RK, ends, blockwise)
    actual = poisoned(grouped_mm_fp8.grouped_mm_fp8_weight_grad, *operands, blockwise)
    assert worst_row(actual, grouped_mm_fp8.grouped_mm_fp8_weight_grad_reference(*operands, blockwise)) < 2.0**-8


@RECIPE
@pytest.mark.parametrize(("wide_grad", "packs_kept"), [(False, False), (True, False), (False, True)])
def test_experts_equal_emulated_ones(poisoned, recipe, wide_grad, packs_kept) -> None:
    """Twice the same bits, without waiting for the device."""
    arguments = float8_rows.inputs(512, 384, GROUPS, "cuda")
    expected = float8_rows.run(EmulatedProducts(RECIPES[recipe], wide_grad, packs_kept), *arguments)
    kernels = Float8Products(recipe == "blockwise", wide_grad, packs_kept)
    first = poisoned(float8_rows.run, kernels, *arguments)
    torch.cuda.set_sync_debug_mode("error")
    second = float8_rows.run(kernels, *arguments)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, second))
    assert not float8_rows.differing(first, expected)


def test_head(poisoned) -> None:
    """As its emulation, without waiting for the device."""
    T, D, V = 333, 512, 151936
    h_TD, weight_VD, labels_T = randn(T, D), randn(V, D) / 16, torch.randint(V, (T,), device="cuda")
    labels_T[::7], h_TD[1, 3] = -100, 1e3
    h_TD[2] = 8 * weight_VD[labels_T[2]]

    def run(products) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (h_TD, weight_VD)]
        loss, _ = linear_cross_entropy_sums(*leaves, labels_T, -100, (1.0,), None, products)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    expected = run(partial(EmulatedHead, recipe=RECIPES["rowwise"]))
    first = poisoned(run, RowwiseHead)
    torch.cuda.set_sync_debug_mode("error")
    second = run(RowwiseHead)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, second))
    for actual, wanted, bound in zip(first, expected, (1e-3, 1e-2, 1e-2), strict=True):
        assert relative_error(actual, wanted) < bound


@RECIPE
@pytest.mark.parametrize("compiled", [False, True])
def test_linear_layer(recipe, compiled) -> None:
    """As its emulation, compiled in one graph, and without waiting for the device."""
    linear = nn.Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x, grad = randn(3, 333, 512).requires_grad_(), randn(3, 333, 384)

    def gradients(layer: nn.Module) -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, layer.weight], grad)]

    expected = gradients(EmulatedLinear(linear, RECIPES[recipe]))
    layer = KernelLinear(linear, recipe == "blockwise")
    layer = torch.compile(layer, fullgraph=True) if compiled else layer
    gradients(layer)
    torch.cuda.set_sync_debug_mode("error")
    found = gradients(layer)
    torch.cuda.set_sync_debug_mode("default")
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_error(actual, wanted) < 1e-2
