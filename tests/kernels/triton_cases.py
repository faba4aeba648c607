"""Runs every Triton kernel in Triton's interpreter, on the CPU, beside its reference; prints the errors as JSON.

A script of its own, since the interpreter must be chosen before Triton is imported.
"""

import itertools
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels import adamw, cross_entropy, document_attention, permute, route, sort, stash, swiglu

for _module in (stash, swiglu):
    _module.programs = lambda R, *_: (min(R, 3),)  # so that programs take more rows than one

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rounding of one result: one unit in the last place of bf16, as the interpreter rounds towards zero; a few operations in fp32.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}


_dot = interpreter.InterpreterBuilder.create_dot


def _dot_of_floats(self, a, b, d, *options):
    """The interpreter holds bf16 as integers, which it would multiply as such."""
    return _dot(self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), d, *options)


interpreter.InterpreterBuilder.create_dot = _dot_of_floats


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest elementwise error over the tolerance of the type, relative to the row's largest element."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.numel() == 0:
        return 0.0
    actual, expected, tolerance = actual.double(), expected.double(), TOLERANCE[actual.dtype]
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    worst = ((actual - expected).abs() / scale).max().item() / tolerance
    return worst if worst == worst else float("inf")


def places(T: int, K: int, rows: int) -> torch.Tensor:
    """Distinct rows for some of the T * K pairs, -1 for the others."""
    row_TK = torch.full((T * K,), -1, dtype=torch.int32)
    pairs = torch.randperm(T * K)[: max(rows - 1, 0)]
    row_TK[pairs] = torch.randperm(rows)[: len(pairs)].int()
    return row_TK.view(T, K)


def spread_rows_cases():
    for name, dtype in DTYPES.items():
        for T, K, R, D in (
            (5, 2, 7, 24),
            (3, 4, 11, 1),
            (9, 1, 4, 33),
            (2, 3, 5, 2049),
            (4, 2, 0, 8),
            (0, 2, 0, 8),
            (2, 2, 3, 0),
        ):
            x_TD, row_TK = torch.randn(T, D, dtype=dtype), places(T, K, R)
            named = row_TK[row_TK >= 0].long()
            expected = permute.spread_rows_reference(x_TD, row_TK, R)[named]
            yield f"spread_rows {name} {T}x{D} to {R}", error(permute._launch_spread_rows(x_TD, row_TK, R)[named], expected)
            strided_TD = torch.randn(T, 2 * D + 1, dtype=dtype)[:, 1 : D + 1]
            expected = permute.spread_rows_reference(strided_TD, row_TK, R)[named]
            yield f"spread_rows {name} strided {D}", error(permute._launch_spread_rows(strided_TD, row_TK, R)[named], expected)


def gather_sum_cases():
    for name, dtype in DTYPES.items():
        for R, T, K, D in ((7, 5, 2, 24), (11, 3, 1, 1), (4, 9, 3, 33), (3, 2, 8, 2049), (5, 0, 2, 8), (0, 4, 2, 8)):
            rows_RD, row_TK = torch.randn(R, D, dtype=dtype), torch.randint(-1, R, (T, K)) if R else torch.full((T, K), -1)
            expected = permute.gather_sum_reference(rows_RD, row_TK)
            yield f"gather_sum {name} {R}x{D} to {T}x{K}", error(permute._launch_gather_sum(rows_RD, row_TK), expected)
        # Rows that no token names may hold anything.
        rows_RD = torch.randn(4, 6, dtype=dtype)
        rows_RD[2:] = torch.nan
        row_TK = torch.tensor([[0, -1], [1, 0], [-1, -1]])
        expected = permute.gather_sum_reference(rows_RD, row_TK)
        yield f"gather_sum {name} beside NaN", error(permute._launch_gather_sum(rows_RD, row_TK), expected)


def swiglu_cases():
    for name, dtype in DTYPES.items():
        for R, F, num_rows in ((7, 24, 7), (5, 1, 3), (9, 33, 8), (3, 1025, 2), (4, 16, 0), (0, 8, 0)):
            gate_up_R2F, grad_RF = torch.randn(R, 2, F, dtype=dtype), torch.randn(R, F, dtype=dtype)
            weights_P, count = torch.rand(2 * R), torch.tensor([num_rows], dtype=torch.int32)
            pair_R = torch.randperm(2 * R)[:R].int()
            pair_R[num_rows:] = -1
            for tensor in (gate_up_R2F, grad_RF):
                tensor[num_rows:] = torch.nan
            case = f"{name} {R}x{F}, {num_rows} rows"
            expected = swiglu.weighted_swiglu_reference(gate_up_R2F, weights_P, pair_R, count)[:num_rows]
            actual = swiglu._launch_forward(gate_up_R2F, weights_P, pair_R, count)[:num_rows]
            yield f"weighted_swiglu {case}", error(actual, expected)
            inputs = (grad_RF, gate_up_R2F, weights_P, pair_R, count)
            outputs = {"gate_up": num_rows, "weights": 2 * R, "act": num_rows}
            backward = swiglu._launch_backward(*inputs), swiglu.weighted_swiglu_backward_reference(*inputs)
            for (output, rows), actual, wanted in zip(outputs.items(), *backward, strict=True):
                sums = 10 if output == "weights" else 1
                yield f"weighted_swiglu_backward {output} {case}", error(actual[:rows], wanted[:rows]) / sums


def stash_cases():
    for name, dtype in DTYPES.items():
        for R, C, num_rows, first, size in (
            (7, 24, 5, 3, 9),
            (7, 24, 7, 3, 9),
            (5, 2050, 5, 0, 5),
            (3, 8, 3, 9, 9),
            (3, 8, 5, 1, 9),  # more than there are
            (0, 8, 0, 0, 4),
        ):
            x_RC, block_AC = torch.randn(R, C, dtype=dtype), torch.randn(size, C, dtype=dtype)
            expected, place = block_AC.clone(), torch.tensor([first])
            stash.stash_rows_reference(x_RC, torch.tensor([num_rows]), expected, place)
            stash._launch(x_RC, torch.tensor([num_rows]), block_AC, place)
            yield f"stash_rows {name} {num_rows} of {R}x{C} from {first} of {size}", error(block_AC, expected)
    for R, F, num_rows, first, size in ((7, 24, 7, 4, 11), (7, 40, 5, 2, 6), (3, 300, 3, 0, 3)):
        gate_up_A2F, grad_RF, weights_P = torch.randn(size, 2, F), torch.randn(R, F), torch.rand(2 * R)
        pair_R, count, place = torch.randperm(2 * R)[:R].int(), torch.tensor([num_rows]), torch.tensor([first])
        inside = min(num_rows, size - first)
        own_R2F = torch.nn.functional.pad(gate_up_A2F[first:], (0, 0, 0, 0, 0, R - size + first))
        expected = swiglu.weighted_swiglu_backward_reference(grad_RF, own_R2F, weights_P, pair_R, count)
        for way in (swiglu._launch_backward, swiglu.weighted_swiglu_backward_reference):
            actual = way(grad_RF, gate_up_A2F, weights_P, pair_R, count, place)
            case = f"{way.__name__} {R}x{F} from {first} of {size}"
            yield f"stash_rows read {case} gate_up", error(actual[0][:inside], expected[0][:inside])
            yield f"stash_rows read {case} act", error(actual[2][:inside], expected[2][:inside])
            pairs = pair_R[:inside].long()
            yield f"stash_rows read {case} weights", error(actual[1][pairs], expected[1][pairs]) / 10


def sort_pairs_cases():
    for P, num_keys in ((0, 3), (1, 1), (7, 4), (255, 8), (256, 5), (700, 129)):
        for name, key_P in (
            ("random", torch.randint(0, num_keys + 1, (P,))),
            ("one key", torch.full((P,), num_keys - 1)),
            ("left out", torch.full((P,), num_keys)),
            ("int32", torch.randint(0, num_keys + 1, (P,), dtype=torch.int32)),
        ):
            expected = sort.sort_pairs_reference(key_P, num_keys)
            outputs = zip(sort._launch_sort(key_P, num_keys, None, 0), expected, strict=True)
            equal = all(actual.dtype == wanted.dtype and torch.equal(actual, wanted) for actual, wanted in outputs)
            yield f"sort_pairs {name} {P} of {num_keys}", 0.0 if equal else float("inf")


def route_cases():
    """Sums of many products get ten times the tolerance."""
    options = (
        route.RouteOptions(2, True, True, 1.5),
        route.RouteOptions(3, False, True, 2.5, groups=4, limited_groups=2),
        route.RouteOptions(6, True, False, 1.0, groups=4, limited_groups=3),
        route.RouteOptions(1, False, False, 1.0),
        route.RouteOptions(2, True, True, 1.0),
    )
    shapes = ((70, 48, 6), (33, 40, 16), (65, 128, 20), (1, 16, 3), (70, 16, 257))
    for (T, D, E), option in zip(shapes, options, strict=True):
        for given, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)):
            x_TD, gate_ED = torch.randn(T, D).to(dtype), 0.1 * torch.randn(E, D)
            optional = (torch.randn(E), 0.1 * torch.randn(E), torch.rand(T) < 0.8) if given else (None, None, None)
            expected = route.route_reference(x_TD, gate_ED, *optional, None, option)
            case = f"{T}x{D} {dtype}, {E} experts, {'biased' if given else 'bare'}"
            for label, chosen_TK in (("chosen", None), ("given", expected[0])):
                experts, weights, scores, counts = route._launch_route(x_TD, gate_ED, *optional, chosen_TK, option)
                same = torch.equal(experts, expected[0]) and torch.equal(counts, route.block_counts_reference(experts, E))
                yield f"route {label} experts {case}", 0.0 if same else float("inf")
                yield f"route {label} weights {case}", error(weights, expected[1]) / 10
                yield f"route {label} scores {case}", error(scores, expected[2]) / 10
            ordered = sort._launch_sort(experts.flatten(), E, counts, route.COUNTED_TOKENS * option.top_k)
            wanted = sort.sort_pairs_reference(experts.flatten(), E)
            equal = all(torch.equal(a, b) for a, b in zip(ordered, wanted, strict=True))
            yield f"sort_pairs by the router's counts {case}", 0.0 if equal else float("inf")
            for label, grad_scores_TE in (("weights", None), ("weights and scores", torch.randn(T, E))):
                inputs = (torch.randn(T, option.top_k), grad_scores_TE, scores, experts, x_TD, gate_ED, option)
                actual, wanted = route._launch_route_backward(*inputs), route.route_backward_reference(*inputs)
                # Two bf16 parts, which the interpreter rounds towards zero, keep 16 bits.
                slack = {"logits": 10, "x": 10, "gate": 10 if dtype == torch.float32 else 40}
                for (output, times), a, b in zip(slack.items(), actual, wanted, strict=True):
                    yield f"route_backward {output} of {label} {case}", error(a, b) / times


def cross_entropy_cases():
    for name, dtype in DTYPES.items():
        for T, V, first in ((5, 40, 0), (3, 33, 33), (4, 1, 7), (2, 5000, 0), (0, 8, 0)):
            # A wider tensor's columns: rows are contiguous, the whole is not.
            logits_TV = (5 * torch.randn(T, V + 3, dtype=dtype))[:, :V]
            labels_T = torch.randint(0, 2 * V, (T,))
            labels_T[-1:] = -100
            expected = cross_entropy.partial_cross_entropy_reference(logits_TV, labels_T, first)
            for output, actual, wanted in zip(
                ("largest", "sum", "target"), cross_entropy._launch_partial(logits_TV, labels_T, first), expected, strict=True
            ):
                yield f"partial_cross_entropy {output} {name} {T}x{V} from {first}", error(actual, wanted)
            lse_T, grad_T = expected[0] + expected[1].log(), torch.rand(T)
            wanted = cross_entropy.cross_entropy_backward_reference(logits_TV, labels_T, lse_T, grad_T, first)
            cross_entropy._launch_backward(logits_TV, labels_T, lse_T, grad_T, first)
            yield f"cross_entropy_backward {name} {T}x{V} from {first}", error(logits_TV, wanted)


def adamw_cases():
    settings = (0.01, 0.9, 0.95, 1e-8, 0.1, 3)
    for N in (1, 700, 4097, 0):
        for name, dtype in DTYPES.items():
            kinds = (False, torch.float32), (True, torch.float32), (False, torch.bfloat16)
            for (split, kept), scale in itertools.product(kinds, (0.3, torch.nan)):
                master, grad, moments = torch.randn(N), torch.randn(N, dtype=dtype), (0.1 * torch.randn(N), torch.rand(N))
                master, moments, results = master.to(kept), [moment.to(kept) for moment in moments], []
                for update in (adamw._launch, adamw.adamw_reference_):
                    weight, low = adamw.split_fp32(master) if split else (master.clone(), None)
                    state = weight, low, grad, *(moment.clone() for moment in moments)
                    update(*state, torch.tensor(scale), *settings)
                    results.append((adamw.join_fp32(weight, low) if split else weight, *state[3:]))
                for output, actual, expected in zip(("weight", *("exp_avg", "exp_avg_sq")), *results, strict=True):
                    yield f"adamw {output} of {N}, {name} gradient, {kept}, split {split}, scale {scale}", error(actual, expected)


# B, H, key heads, S, width of queries and keys, of values, and how likely a token begins a document.
ATTENTION = (
    (1, 1, 1, 1, 16, 16, 0.0),
    (1, 1, 1, 32, 48, 32, 0.0),
    (1, 1, 1, 64, 16, 32, 0.0),
    (3, 1, 1, 31, 32, 64, 0.2),
    (2, 2, 2, 70, 48, 32, 0.0),
    (2, 2, 2, 96, 48, 32, 0.05),
    (3, 2, 1, 70, 32, 16, 0.1),
    (1, 4, 2, 101, 48, 64, 0.5),
    (2, 4, 1, 33, 48, 16, 1.0),
    (1, 2, 2, 40, 64, 64, 0.9),
)


def document_attention_cases():
    """The interpreter computes tiles of 32 instead of 128 tokens, so that small batches have several."""
    Blocks, edge = document_attention.Blocks, document_attention.TILE
    document_attention.TILE = 32
    blocks = [Blocks(16, 32, 4, 2), Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2)]
    for B, H, Hk, S, D, DV, likely in ATTENTION:
        q, k, grad = (torch.randn(B, S, *shape).transpose(1, 2) for shape in ((H, D), (Hk, D), (H, DV)))
        v = torch.randn(B, S, Hk, 2 * DV)[..., DV:].transpose(1, 2)
        documents, scale = document_attention.find_documents(torch.rand(B, S) < likely), D**-0.5
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected = document_attention.document_attention_reference(*leaves, documents.first_T, scale)
        expected_grads = torch.autograd.grad(expected, leaves, grad.double())
        out, lse = document_attention._launch_forward(q, k, v, documents.first_T, scale, Blocks(32, 16, 4, 2))
        case = f"{B}x{S}, {H} heads of {D} and {DV}, {Hk} key heads, a document with {likely}"
        yield f"document_attention {case}", (out - expected).norm().item() / expected.norm().item() / 2e-6
        # All heads at once, and one key head at a time.
        for workspace in (2**30, 1):
            grads = document_attention._launch_backward(grad, q, k, v, out, lse, documents, scale, workspace, *blocks)
            for name, actual, wanted in zip("qkv", grads, expected_grads, strict=True):
                # Where every document is one token, the gradients of queries and keys are zero.
                norm = max(wanted.norm().item(), 0.1 * grad.norm().item())
                yield (
                    f"document_attention_backward {name} {case}, workspace {workspace}",
                    (actual - wanted).norm().item() / norm / 2e-6,
                )
    document_attention.TILE = edge
    # As PyTorch sees the op: shapes and strides under compilation, and its gradient.
    q, k, v = (torch.randn(2, 20, 2, width).transpose(1, 2).requires_grad_() for width in (48, 48, 16))
    documents = document_attention.find_documents(torch.rand(2, 20) < 0.2)
    torch.library.opcheck(torch.ops.moe_titan.document_attention.default, (q, k, v, *documents, 0.2))


CASES = (
    adamw_cases,
    spread_rows_cases,
    gather_sum_cases,
    swiglu_cases,
    stash_cases,
    sort_pairs_cases,
    route_cases,
    cross_entropy_cases,
    document_attention_cases,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({case: worst for cases in CASES for case, worst in cases()}))
