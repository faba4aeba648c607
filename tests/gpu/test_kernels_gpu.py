"""Every kernel on the GPU against fp64: odd sizes, poisoned memory, strided input, and rows that hold no data."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.grouped_products import of_weight_grad
from benchmarks.moe_layer import relative_error
from kernels import cross_entropy, grouped_mm_launch, permute, route, sort, stash, swiglu
from kernels.expert_mlp import expert_mlp, expert_mlp_reference
from kernels.grouped_mm import (
    grouped_mm,
    grouped_mm_reference,
    grouped_mm_weight_grad,
    grouped_mm_weight_grad_reference,
)
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.quantize import quantize_rows, quantize_weights
from kernels.route import RouteOptions

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDED = {BF16: 2.0**-8, FP32: 3e-6}  # one result rounded
PRODUCTS = {BF16: 1e-2, FP32: 5e-6}  # a chain of products, each rounded
DEVICE = "cuda"


def randn(*shape: int, dtype: torch.dtype = FP32, strided: bool = False) -> torch.Tensor:
    """Random numbers; with ``strided`` the middle columns of a wider tensor."""
    wide = torch.randn(*shape[:-1], shape[-1] + 3 * strided, dtype=dtype, device=DEVICE)
    return wide[..., strided : shape[-1] + strided]


def ends_of(groups: list[int]) -> torch.Tensor:
    return torch.tensor(groups, device=DEVICE).cumsum(0, dtype=torch.int32)


def places(T: int, K: int, rows: int) -> torch.Tensor:
    """Distinct rows for some of the T * K pairs, -1 for the others."""
    row_TK = torch.full((T * K,), -1, dtype=torch.int32, device=DEVICE)
    named = torch.randperm(T * K, device=DEVICE)[: max(rows - 1, 0)]
    row_TK[named] = torch.randperm(rows, device=DEVICE)[: len(named)].int()
    return row_TK.view(T, K)


MOVES = [(1, 1, 3, 1), (5, 2, 7, 24), (333, 8, 2500, 1000), (64, 6, 300, 2049), (0, 2, 4, 8)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("T", "K", "R", "D"), MOVES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_move(poisoned, dtype, T, K, R, D, strided) -> None:
    x_TD, rows_RD, row_TK = randn(T, D, dtype=dtype, strided=strided), randn(R, D, dtype=dtype, strided=strided), places(T, K, R)
    spread_RD = poisoned(permute.spread_rows, x_TD, row_TK, R)
    named = row_TK[row_TK >= 0].long()
    assert torch.equal(spread_RD[named], permute.spread_rows_reference(x_TD, row_TK, R)[named])
    absent = torch.ones(R, dtype=torch.bool, device=DEVICE).index_fill_(0, named, False)
    rows_RD[absent] = math.nan
    y_TD = poisoned(permute.gather_sum, rows_RD, row_TK)
    assert relative_error(y_TD, permute.gather_sum_reference(rows_RD.double(), row_TK)) < ROUNDED[dtype]


def test_rows_move_out_of_transposed_tensors() -> None:
    x_TD, rows_RD, row_TK = randn(40, 33).t(), randn(40, 70).t(), places(33, 2, 70)
    named = row_TK[row_TK >= 0].long()
    assert torch.equal(permute.spread_rows(x_TD, row_TK, 70)[named], permute.spread_rows_reference(x_TD, row_TK, 70)[named])
    assert relative_error(permute.gather_sum(rows_RD, row_TK), permute.gather_sum_reference(rows_RD.double(), row_TK)) < 1e-6


@pytest.mark.parametrize(("R", "F", "num_rows"), [(1, 1, 1), (77, 33, 70), (300, 1025, 299), (64, 768, 0), (500, 1408, 500)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_weighted_swiglu(poisoned, dtype, R, F, num_rows) -> None:
    gate_up_R2F, grad_RF = randn(R, 2, F, dtype=dtype), randn(R, F, dtype=dtype, strided=True)
    for tensor in (gate_up_R2F, grad_RF):
        tensor[num_rows:] = math.nan
    weights_P, count = torch.rand(2 * R, device=DEVICE), torch.tensor([num_rows], dtype=torch.int32, device=DEVICE)
    pair_R = torch.randperm(2 * R, device=DEVICE)[:R].int()
    pair_R[num_rows:] = -1
    act_RF = poisoned(swiglu.weighted_swiglu, gate_up_R2F, weights_P, pair_R, count)
    wide = (gate_up_R2F.double(), weights_P.double(), pair_R, count)
    assert relative_error(act_RF[:num_rows], swiglu.weighted_swiglu_reference(*wide)[:num_rows]) < ROUNDED[dtype]
    actual = poisoned(swiglu.weighted_swiglu_backward, grad_RF, gate_up_R2F, weights_P, pair_R, count)
    expected = swiglu.weighted_swiglu_backward_reference(grad_RF.double(), *wide)
    for index, (bound, rows) in enumerate(((ROUNDED[dtype], num_rows), (1e-5, 2 * R), (ROUNDED[dtype], num_rows))):
        assert relative_error(actual[index][:rows], expected[index][:rows]) < bound


@pytest.mark.parametrize(
    ("R", "F", "num_rows", "first", "size"), [(300, 768, 290, 77, 400), (300, 24, 300, 150, 400), (9, 2049, 0, 0, 5)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_stashed_rows(poisoned, dtype, R, F, num_rows, first, size) -> None:
    """Rows in a block, of which the last ones may not fit, and the gradient that reads them there: bit for bit the same."""
    gate_up_R2F, grad_RF, weights_P = randn(R, 2, F, dtype=dtype), randn(R, F, dtype=dtype), torch.rand(2 * R, device=DEVICE)
    pair_R, count = torch.randperm(2 * R, device=DEVICE)[:R].int(), torch.tensor([num_rows], device=DEVICE)
    block_A2F, place = randn(size, 2, F, dtype=dtype), torch.tensor([first], device=DEVICE)
    wanted, inside = block_A2F.clone(), min(num_rows, size - first)
    wanted[first : first + inside] = gate_up_R2F[:inside]
    stash.stash_rows(gate_up_R2F.flatten(1), count, block_A2F.flatten(1), place)
    assert torch.equal(block_A2F, wanted)
    arguments = weights_P, pair_R, count
    actual = poisoned(swiglu.weighted_swiglu_backward, grad_RF, block_A2F, *arguments, place)
    expected = swiglu.weighted_swiglu_backward(grad_RF, gate_up_R2F, *arguments)
    for index, rows in ((0, slice(inside)), (1, pair_R[:inside].long()), (2, slice(inside))):
        assert torch.equal(actual[index][rows], expected[index][rows])


def assert_sorted(actual: tuple[torch.Tensor, ...], key_P: torch.Tensor, keys: int) -> None:
    expected = sort.sort_pairs_reference(key_P, keys)
    assert all(a.dtype == e.dtype and torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_sort_pairs_of_int32() -> None:
    key_P = torch.randint(0, 21, (1000,), device=DEVICE, dtype=torch.int32)
    assert_sorted(sort.sort_pairs(key_P, 20), key_P, 20)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("P", "keys"), [(0, 3), (1, 1), (127, 6), (128, 2), (129, 20), (5000, 160), (12345, 256), (262147, 128), (98304, 64)]
)
def test_sort_pairs(poisoned, P, keys, strided) -> None:
    key_P = torch.randint(0, keys + 1, (P, 1 + strided), device=DEVICE)[:, 0]
    for each_P in (key_P, torch.full_like(key_P, keys - 1), torch.full_like(key_P, keys)):
        assert_sorted(poisoned(sort.sort_pairs, each_P, keys), each_P, keys)


# Experts, tokens, options (K from 1 to 8), and whether there are biases and padding.
ROUTES = [
    (6, 1, RouteOptions(1, True, False, 1.0), False),
    (20, 65, RouteOptions(2, False, True, 2.5, groups=4, limited_groups=2), True),
    (160, 333, RouteOptions(3, True, False, 16.0, groups=8, limited_groups=3), True),
    (16, 50, RouteOptions(4, False, False, 1.0), False),
    (128, 200, RouteOptions(5, True, True, 1.0), True),
    (64, 129, RouteOptions(6, True, True, 1.5), False),
    (12, 1, RouteOptions(7, False, True, 1.0), True),
    (256, 1500, RouteOptions(8, False, True, 2.5, groups=8, limited_groups=4), True),
]


@pytest.mark.parametrize(
    ("dtype", "E", "T", "options", "given"),
    # Compiling takes the time of this test: fp32, which is not what trains, gets a part of the cases.
    [(BF16, *case) for case in ROUTES] + [(FP32, *case) for case in ROUTES[1:6:2]],
    ids=str,
)
def test_route(poisoned, dtype, E, T, options, given) -> None:
    """fp64 chooses the same experts; weights, scores and all gradients are compared for those."""
    x_TD = randn(T, 100, dtype=dtype, strided=True).detach().requires_grad_()
    gate_ED = (0.1 * randn(E, 100)).requires_grad_()
    gate_bias_E, bias_E, valid_T = (0.3 * randn(E)).requires_grad_(), 0.1 * randn(E), torch.rand(T, device=DEVICE) < 0.8
    extra = {"gate_bias_E": gate_bias_E, "bias_E": bias_E, "valid_T": valid_T} if given else {}
    experts_TK, weights_TK, scores_TE, counts = poisoned(route.route, x_TD, gate_ED, options, **extra)
    grads = torch.randn_like(weights_TK), torch.randn_like(scores_TE)
    inputs = [x_TD, gate_ED, *([gate_bias_E] if given else [])]
    actual = poisoned(torch.autograd.grad, (weights_TK, scores_TE), inputs, grads)

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    fixed = (wide[2], bias_E.double(), valid_T) if given else (None, None, None)
    chosen_TK, _, _ = route.route_reference(*wide[:2], *fixed, None, options)
    assert (experts_TK == chosen_TK).all(1).double().mean() > 0.999
    _, wide_weights_TK, wide_scores_TE = route.route_reference(*wide[:2], *fixed, experts_TK, options)
    precision = 1e-6 if dtype == BF16 else 5e-6
    assert relative_error(weights_TK, wide_weights_TK) < precision
    assert relative_error(scores_TE, wide_scores_TE) < precision
    expected = torch.autograd.grad((wide_weights_TK, wide_scores_TE), wide, [grad.double() for grad in grads])
    bounds = (2.0**-8 if dtype == BF16 else 1e-5, 1e-5, 1e-5)
    assert all(relative_error(a, e) < bound for a, e, bound in zip(actual, expected, bounds, strict=False))

    assert torch.equal(counts, route.block_counts_reference(experts_TK, E))
    key_P, block_pairs = experts_TK.flatten(), route.COUNTED_TOKENS * options.top_k
    assert_sorted(poisoned(sort.sort_pairs, key_P, E, counts, block_pairs), key_P, E)


@pytest.mark.parametrize(("E", "K", "D"), [(128, 8, 2048), (256, 8, 7168)])
def test_route_chooses_as_fp64(E, K, D) -> None:
    options = RouteOptions(K, True, True, 1.0)
    x_TD, gate_ED = randn(8192, D, dtype=BF16), randn(E, D) * D**-0.5
    experts_TK, weights_TK, _, _ = route.route(x_TD, gate_ED, options)
    chosen_TK, wide_TK, _ = route.route_reference(x_TD.double(), gate_ED.double(), None, None, None, None, options)
    assert (experts_TK.sort(1).values == chosen_TK.sort(1).values).all(1).double().mean() > 0.999
    same_TK = experts_TK == chosen_TK
    assert relative_error(weights_TK[same_TK], wide_TK[same_TK]) < 1e-6


def random_groups(E: int, rows: int) -> list[int]:
    """Sizes of which half are zero."""
    expert_R = 2 * torch.randint(0, E // 2, (rows,), generator=torch.Generator().manual_seed(E))
    return torch.bincount(expert_R, minlength=E).tolist()


GROUPS = {"edges": [0, 1, 7, 63, 65, 127, 129], "one": [0, 0, 500, 0], "none": [0, 0, 0]}
GROUPS["ragged"] = [1000, 0, 129, 64, 1, 128, 127, 192, 7]
GROUPS |= {str(E): random_groups(E, 20 * E) for E in (6, 20, 160, 256)}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_grouped_products(poisoned, dtype, groups) -> None:
    rows, E, ends = sum(groups), len(groups), ends_of(groups)
    a_RK, b_EKN, grad_RN = randn(rows + 5, 72, dtype=dtype), randn(E, 72, 40, dtype=dtype), randn(rows + 5, 40, dtype=dtype)
    a_RK[rows:], grad_RN[rows:] = math.nan, math.nan
    out_RN = poisoned(grouped_mm, a_RK, b_EKN, ends)[:rows]
    assert relative_error(out_RN, grouped_mm_reference(a_RK.double(), b_EKN.double(), ends)[:rows]) < ROUNDED[dtype]
    weight_ENK = poisoned(grouped_mm_weight_grad, grad_RN, a_RK, ends)
    for actual, expected, size in zip(
        weight_ENK, grouped_mm_weight_grad_reference(grad_RN.double(), a_RK.double(), ends), groups, strict=True
    ):
        assert relative_error(actual, expected) < ROUNDED[dtype]
        assert size or not actual.any()


# Tiles that are cut off, whole ones, and less than one.
SIZES = pytest.mark.parametrize(("N", "K"), [(264, 328), (512, 128), (40, 72)])


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@SIZES
@pytest.mark.parametrize(("transposed", "strided"), [(False, False), (True, False), (True, True)])
def test_grouped_mm(poisoned, transposed, strided, N, K, groups) -> None:
    rows, E, ends = sum(groups), len(groups), ends_of(groups)
    a_RK = randn(rows + 5, K, dtype=BF16, strided=strided)
    b_EKN = randn(E, N, K, dtype=BF16).transpose(1, 2) if transposed else randn(E, K, N, dtype=BF16)
    a_RK[rows:] = math.nan
    out_RN = poisoned(grouped_mm, a_RK, b_EKN, ends)[:rows]
    assert relative_error(out_RN, grouped_mm_reference(a_RK.double(), b_EKN.double(), ends)[:rows]) < ROUNDED[BF16]


@pytest.mark.parametrize("groups", [*GROUPS.values(), [100]], ids=[*GROUPS, "single"])
@pytest.mark.parametrize("strided", [False, True])
@SIZES
def test_weight_grad(poisoned, N, K, strided, groups) -> None:
    """Group by group, beside rows without data and beside the largest group full of NaN, which harms no other."""
    rows, ends, largest = sum(groups), ends_of(groups), groups.index(max(groups))
    grad_RN, a_RK = (randn(rows + 5, width, dtype=BF16, strided=strided) for width in (N, K))
    grad_RN[rows:], a_RK[rows:] = math.nan, math.nan
    weight_ENK = poisoned(grouped_mm_weight_grad, grad_RN, a_RK, ends)
    for actual, expected, size in zip(
        weight_ENK, grouped_mm_weight_grad_reference(grad_RN.double(), a_RK.double(), ends), groups, strict=True
    ):
        assert relative_error(actual, expected) < ROUNDED[BF16]
        assert size or not actual.any()
    end, others = ends[largest].item(), torch.arange(len(groups), device=DEVICE) != largest
    grad_RN[end - groups[largest] : end], a_RK[end - groups[largest] : end] = math.nan, math.nan
    beside_ENK = poisoned(grouped_mm_weight_grad, grad_RN, a_RK, ends)
    assert torch.equal(beside_ENK[others], weight_ENK[others])


def test_weight_grad_replays_with_other_groups() -> None:
    """A CUDA graph gives the bits of an eager call, whatever the groups."""
    grad_RN, a_RK, ends = randn(1100, 2048, dtype=BF16), randn(1100, 768, dtype=BF16), ends_of([700, 400])
    grouped_mm_weight_grad(grad_RN, a_RK, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_ENK = grouped_mm_weight_grad(grad_RN, a_RK, ends)
    for groups in ([700, 400], [0, 1099], [37, 1024], [0, 0]):
        ends.copy_(ends_of(groups))
        graph.replay()
        assert torch.equal(captured_ENK, grouped_mm_weight_grad(grad_RN, a_RK, ends))


def test_graphs_count_tiles_of_their_own() -> None:
    """Two graphs that are replayed at once, beside more launches than there are counters; the first of which may be captured."""
    a_RK, b_EKN, ends = randn(65536, 768, dtype=BF16), randn(16, 768, 2048, dtype=BF16), ends_of([4096] * 16)
    grouped_mm(a_RK[:128], b_EKN, ends_of([128] + [0] * 15))  # compiles
    grouped_mm_launch._counters.cache_clear()
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(grouped_mm(a_RK, b_EKN, ends))
        for _ in range(1023):
            grouped_mm(a_RK[:128], b_EKN, ends_of([128] + [0] * 15))
    expected, other = grouped_mm(a_RK, b_EKN, ends), torch.cuda.Stream()
    for _ in range(5):
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            graphs[0].replay()
        graphs[1].replay()
        eager = grouped_mm(a_RK, b_EKN, ends)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*captured, eager))


def test_tiles_are_shared_out_anew_by_every_launch() -> None:
    """The same bits by launches on two streams at once, also where programs end while others' begin; all counters are zero."""
    groups = random_groups(128, 65536)
    ends, products = ends_of(groups), {}
    for N, K in ((1536, 2048), (2048, 768)):
        a_RK, grad_RN = randn(65536, K, dtype=BF16), randn(65536, N, dtype=BF16)
        b_EKN = randn(128, N, K, dtype=BF16).transpose(1, 2)
        products[f"output {N}"] = partial(grouped_mm, a_RK, b_EKN, ends)
        products[f"weight grad {N}"] = partial(grouped_mm_weight_grad, grad_RN, a_RK, ends)
        for blockwise in (False, True):
            rows = *quantize_rows(a_RK, ends[-1:], blockwise), *quantize_weights(b_EKN.transpose(1, 2), blockwise, False)
            columns = *of_weight_grad(grad_RN, ends, blockwise)[:2], *of_weight_grad(a_RK, ends, blockwise)
            products[f"FP8 output {N} {blockwise}"] = partial(grouped_mm_fp8, *rows, ends, blockwise)
            products[f"FP8 weight grad {N} {blockwise}"] = partial(grouped_mm_fp8_weight_grad, *columns, blockwise)
    other = torch.cuda.Stream()
    for name, product in products.items():
        expected = product()
        for _ in range(5):
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                results = [product() for _ in range(4)]
            results += [product() for _ in range(4)]
            torch.cuda.synchronize()
            assert all(torch.equal(result, expected) for result in results), name
    counters = grouped_mm_launch._counters(a_RK.device)
    assert not torch.stack([next(counters) for _ in range(1024)]).any()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_expert_mlp(poisoned, dtype, K, groups) -> None:
    """Output and every gradient, expert by expert, beside rows without data that hold NaN."""
    rows, E, ends = sum(groups), len(groups), ends_of(groups)
    N, D, width, tail = rows // K + 3, 72, 40, 5
    pair_R = torch.cat((torch.randperm(N * K, device=DEVICE)[:rows], torch.full((tail,), -1, device=DEVICE))).int()
    row_P = torch.full((N * K,), -1, dtype=torch.int32, device=DEVICE)
    row_P[pair_R[:rows].long()] = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    experts = (randn(E, 2, width, D, dtype=dtype) * D**-0.5, randn(E, D, width, dtype=dtype) * width**-0.5)
    leaves = (randn(N, D + 8, dtype=dtype)[:, 8:], *experts, torch.rand(N * K, device=DEVICE))
    x_ND, w13, w2, weights_P = inputs = [tensor.detach().requires_grad_() for tensor in leaves]
    grad_RD = randn(D, rows + tail, dtype=dtype).t()  # not contiguous

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_RD = expert_mlp_reference(*wide, pair_R, ends)
    expected = torch.autograd.grad(expected_RD[:rows], wide, grad_RD[:rows].double())
    grad_RD[rows:] = math.nan
    out_RD = poisoned(expert_mlp, *inputs, pair_R, row_P.view(N, K), ends)
    actual = poisoned(torch.autograd.grad, out_RD, inputs, grad_RD)

    starts = [0, *ends.tolist()]
    for start, end in zip(starts, starts[1:], strict=False):
        assert relative_error(out_RD[start:end], expected_RD[start:end]) < PRODUCTS[dtype]
    (x_grad, *weight_grads, route_grad), (wide_x, *wide_weights, wide_route) = actual, expected
    assert relative_error(x_grad, wide_x) < PRODUCTS[dtype]
    assert relative_error(route_grad, wide_route) < PRODUCTS[dtype]
    for grad, wide_grad in zip(weight_grads, wide_weights, strict=True):
        assert max(map(relative_error, grad, wide_grad)) < PRODUCTS[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_expert_mlp_without_rows(dtype) -> None:
    """No token reached this rank, and nothing was allocated for any."""
    w13, w2 = (randn(*shape, dtype=dtype).requires_grad_() for shape in ((2, 2, 16, 32), (2, 32, 16)))
    x_ND, index = randn(0, 32, dtype=dtype).requires_grad_(), torch.empty(0, dtype=torch.int32, device=DEVICE)
    weights_P = torch.rand(0, device=DEVICE, requires_grad=True)
    out_RD = expert_mlp(x_ND, w13, w2, weights_P, index, index.view(0, 1), ends_of([0, 0]))
    out_RD.sum().backward()
    assert out_RD.shape == (0, 32) and not w13.grad.any() and not w2.grad.any()


@pytest.mark.parametrize(("T", "V", "first"), [(1, 1, 0), (33, 1000, 1000), (203, 5003, 2500), (64, 32768, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_partial_cross_entropy(poisoned, dtype, T, V, first) -> None:
    logits_TV, labels_T = randn(T, V, dtype=dtype, strided=True).mul_(5), torch.randint(0, 2 * V, (T,), device=DEVICE)
    labels_T[-1] = -100
    wide_TV = logits_TV.double()
    expected = cross_entropy.partial_cross_entropy_reference(wide_TV, labels_T, first)
    max_T, sum_T, target_T = poisoned(cross_entropy.partial_cross_entropy, logits_TV, labels_T, first)
    assert torch.equal(max_T.double(), expected[0]) and torch.equal(target_T.double(), expected[2])
    assert relative_error(sum_T, expected[1]) < 2e-6
    lse_T, grad_T = max_T + sum_T.log(), torch.rand(T, device=DEVICE)
    wanted_TV = cross_entropy.cross_entropy_backward_reference(wide_TV, labels_T, lse_T.double(), grad_T.double(), first)
    cross_entropy.cross_entropy_backward_(logits_TV, labels_T, lse_T, grad_T, first)
    assert relative_error(logits_TV, wanted_TV) < ROUNDED[dtype]


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_linear_cross_entropy(monkeypatch, poisoned, dtype, slices) -> None:
    T, V = 203, 5003
    monkeypatch.setattr(cross_entropy, "_SLICE", -(-T * V // slices))
    inputs = [randn(T, 64, dtype=dtype).requires_grad_(), (randn(V, 64, dtype=dtype) * 0.125).requires_grad_()]
    labels_T = torch.where(torch.rand(T, device=DEVICE) < 0.2, -100, torch.randint(0, V, (T,), device=DEVICE))
    runs = []
    for _ in range(2):
        loss, _ = poisoned(cross_entropy.linear_cross_entropy_sums, *inputs, labels_T, -100, (1.0,))
        runs.append((loss, *torch.autograd.grad(loss, inputs)))
    assert all(map(torch.equal, *runs))
    h_TD, weight_VD = wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = F.cross_entropy(h_TD @ weight_VD.t(), labels_T, ignore_index=-100, reduction="sum")
    expected = (wanted, *torch.autograd.grad(wanted, wide))
    bounds = (1e-3, 5e-3, 5e-3) if dtype == BF16 else (1e-5, 1e-5, 1e-5)
    assert all(relative_error(a, e) < bound for a, e, bound in zip(runs[0], expected, bounds, strict=True))
