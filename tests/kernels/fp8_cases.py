"""Runs the Triton kernels of FP8 in Triton's interpreter, on the CPU, beside their references; prints the errors as JSON.

A script of its own, since the interpreter must be chosen before Triton is imported.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from kernels import grouped_mm_fp8, packed_tokens, quantize, swiglu_fp8

for _module in (quantize, swiglu_fp8):
    _module.programs = lambda R, *_: (min(R, 3),)  # so that programs take more rows than one

TYPES = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def _tensor(data: np.ndarray, kind: tl.dtype) -> Tensor:
    """The interpreter holds bf16 and E4M3 as integers."""
    if kind not in TYPES:
        return torch.from_numpy(np.ascontiguousarray(data))
    return torch.from_numpy(np.ascontiguousarray(data).view(np.int16 if kind == tl.bfloat16 else np.uint8)).view(TYPES[kind])


def _convert(data, source, target, rounding=None):
    """As the hardware rounds: to nearest, ties to even. The interpreter's own conversion does not."""
    converted = _tensor(data, source).to(TYPES.get(target, torch.float32)).contiguous()
    bits = {tl.bfloat16: torch.int16, tl.float8e4nv: torch.uint8}.get(target, torch.float32)
    return converted.view(bits).numpy().reshape(data.shape)


interpreter._convert_float = _convert


def different(actual: Tensor, expected: Tensor) -> float:
    """The share of numbers that differ in any bit; all NaN are the same."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    a, b = actual.float(), expected.float()
    return ((a != b) & ~(a.isnan() & b.isnan())).double().mean().item() if a.numel() else 0.0


def numbers(R: int, D: int, dtype: torch.dtype) -> Tensor:
    """Rows of all sizes: one of zeros, one with a huge outlier, one with NaN and one with infinity."""
    x_RD = torch.randn(R, D) * 10.0 ** torch.randint(-8, 8, (R, 1))
    for i, value in enumerate((0.0, 1e30, torch.nan, torch.inf)):
        if R > i + 2:
            x_RD[i, 0 if i else slice(None)] = value
    return x_RD.to(dtype)


def same_products(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], chosen=slice(None)) -> float:
    """Elements and scales bit for bit."""
    (elements, scale), (wanted, wanted_scale) = actual, expected
    return different(elements[chosen], wanted[chosen]) + different(scale[..., chosen], wanted_scale[..., chosen])


def row_cases():
    for dtype in (torch.float32, torch.bfloat16):
        for R, D, blockwise in (
            (9, 128, True),
            (7, 384, True),
            (5, 144, False),
            (6, 16, False),
            (1, 2048, False),
            (0, 128, True),
        ):
            x_RD = numbers(R, D, dtype)
            count = torch.tensor([max(R - 1, 0)])
            expected = quantize.quantize_rows_reference(x_RD, blockwise)
            actual = quantize._launch_rows(x_RD, count, blockwise)
            case = f"{dtype} {R}x{D}, blockwise {blockwise}"
            yield f"quantize_rows {case}", same_products(actual, expected, slice(0, max(R - 1, 0)))
            N, K = max(R // 2, 1), 2
            row_NK = torch.full((N * K,), -1, dtype=torch.int32)
            row_NK[: min(R, 2 * N) - 1] = torch.randperm(R)[: min(R, 2 * N) - 1].int() if R > 1 else -1
            row_NK = row_NK[torch.randperm(N * K)].view(N, K)
            named = row_NK[row_NK >= 0].long()
            tokens = torch.cat((numbers(N, D, dtype), torch.zeros(N, 16, dtype=dtype)), dim=1)[:, :D]
            expected = quantize.spread_rows_fp8(tokens, row_NK, R, blockwise)
            yield f"spread_rows_fp8 {case}", same_products(quantize.launch_spread(tokens, row_NK, R, blockwise), expected, named)


def different_tokens(words_NW: Tensor, elements_ND: Tensor, scale: Tensor) -> float:
    (N, D), scale_NS = elements_ND.shape, scale.view(-1, len(elements_ND)).t()
    assert words_NW.shape == (N, packed_tokens.words_of_token(D, scale.ndim == 2))
    wrong = different(words_NW[:, : D // 4].contiguous().view(quantize.E4M3), elements_ND)
    return wrong + different(words_NW[:, D // 4 : D // 4 + scale_NS.shape[1]].view(torch.float32), scale_NS)


def packed_cases():
    """Tokens packed by the kernel and spread to rows: as by the references of packing and of tokens that are not."""
    for N, D, K, groups in ((9, 128, 2, [5, 0, 7]), (70, 384, 3, [1, 129, 0, 60]), (6, 80, 1, [2, 0, 3]), (1, 2048, 4, [3])):
        for dtype in (torch.float32, torch.bfloat16):
            x_ND, count = numbers(N, D + 8, dtype)[:, :D], sum(groups)
            pair_R = torch.randperm(N * K)[: count + 2].int()
            pair_R[count:] = -1
            row_P = torch.full((N * K,), -1, dtype=torch.int32)
            row_P[pair_R[:count].long()] = torch.arange(count, dtype=torch.int32)
            row_NK = row_P.view(N, K)
            for blockwise in (True, False) if D % 128 == 0 else (False,):
                case = f"{dtype} {N}x{D}, {groups}, blockwise {blockwise}"
                words = packed_tokens._launch_pack(x_ND, blockwise)
                elements, scale = quantize.quantize_rows_reference(x_ND, blockwise)
                for name, packed in (("kernel", words), ("op", packed_tokens.pack_tokens(x_ND, blockwise))):
                    yield f"pack_tokens {name} {case}", different_tokens(packed, elements, scale)
                expected = quantize.spread_rows_fp8(x_ND, row_NK, count + 2, blockwise)
                for name, op in (("kernel", packed_tokens._launch_spread_and_pack), ("op", packed_tokens.spread_and_pack)):
                    *rows, again = op(x_ND, row_NK, count + 2, blockwise)
                    wrong = same_products(rows, expected, slice(0, count)) + different_tokens(again, elements, scale)
                    yield f"spread_and_pack {name} {case}", wrong
                for name, op in (("kernel", packed_tokens._launch_spread), ("op", packed_tokens.spread_packed)):
                    actual = op(words, row_NK, count + 2, D, blockwise)
                    yield f"spread_packed {name} {case}", same_products(actual, expected, slice(0, count))


def tile_cases():
    for E, N, K in ((1, 128, 128), (3, 256, 128), (2, 128, 384)):
        w_ENK = numbers(E * N, K, torch.bfloat16).view(E, N, K)
        for transposed in (False, True):
            actual, expected = quantize._launch_tiles(w_ENK, transposed), quantize.quantize_tiles_reference(w_ENK, transposed)
            for part, a, b in zip(("elements", "scale"), actual, expected, strict=True):
                yield f"quantize_tiles {part} {E}x{N}x{K}, transposed {transposed}", different(a, b)


def part_cases():
    for P, N, K in ((2, 16, 16), (3, 48, 80), (8, 128, 144)):
        parts_PNK = torch.randn(P, N, K).bfloat16()
        expected = parts_PNK.double().sum(0).float().bfloat16()  # no sum of so few is between two of fp32 and of bf16, too
        yield f"add_parts {P}x{N}x{K}", different(grouped_mm_fp8._launch_add_parts(parts_PNK), expected)


def dequantized(elements: Tensor, scale: Tensor) -> Tensor:
    """Rows [R, D] of elements times their scales."""
    wide = scale[:, None] if scale.ndim == 1 else scale.t().repeat_interleave(128, 1)
    return elements.float() * wide


BF16_ROUNDING = 2.0**-7
"""By how much sums in another order may differ, over the number, once they are rounded to bf16: one may be rounded down and the
other up, and the next number after 1 is 1 + 2^-7. Before that, in fp32, they differ by a thousandth of it."""


def far(actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """Largest error relative to the largest number of each row, over the tolerance."""
    if not actual.numel():
        return 0.0
    size = expected.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    worst = ((actual.float() - expected.float()).abs() / size).max().item() / tolerance
    return worst if worst == worst else float("inf")


def swiglu_cases():
    """Values one bf16 rounding apart may be one of E4M3 apart: 1 / 8 of the largest at most, and rarely."""
    for R, F, num_rows, blockwise in (
        (7, 128, 7, True),
        (5, 384, 3, True),
        (5, 48, 4, False),
        (3, 144, 0, False),
        (9, 528, 8, False),
        (4, 80, 4, False),
        (0, 128, 0, True),
        (0, 64, 0, False),
    ):
        # Behind each are rows that who reads too far would take for data.
        gate_up_R2F, grad_RF = torch.randn(R + 3, 2, F).bfloat16()[:R], torch.randn(R + 3, F).bfloat16()[:R]
        if R > 1:
            gate_up_R2F[0, 1, 3], grad_RF[1] = 300, 0
        weights_P, count = torch.rand(2 * R), torch.tensor([num_rows], dtype=torch.int32)
        pair_R = torch.randperm(2 * R).int()[:R]
        pair_R[num_rows:] = -1
        gate_up_R2F[num_rows:], grad_RF[num_rows:] = torch.nan, torch.nan
        case, filled = f"{R}x{F}, {num_rows} rows, blockwise {blockwise}", slice(0, num_rows)
        arguments = gate_up_R2F, weights_P, pair_R, count
        actual, expected = (
            dequantized(*op(*arguments, blockwise))[filled] for op in (swiglu_fp8._launch_forward, swiglu_fp8.weighted_swiglu_fp8)
        )
        yield f"weighted_swiglu_fp8 {case}", far(actual, expected, 1 / 8)
        yield f"weighted_swiglu_fp8 mostly {case}", (actual != expected).double().mean().item() / 0.02 if actual.numel() else 0.0
        actual, expected = (
            op(grad_RF, *arguments, blockwise) for op in (swiglu_fp8._launch_backward, swiglu_fp8.weighted_swiglu_fp8_backward)
        )
        for name, i in (("gate_up", 0), ("act", 4)):
            yield f"weighted_swiglu_fp8_backward {name} {case}", far(actual[i][filled], expected[i][filled], BF16_ROUNDING)
        yield f"weighted_swiglu_fp8_backward weights {case}", far(actual[3], expected[3], 1e-5)
        if not blockwise:
            # The same quantised alone, as what came out beside is.
            ways = (
                # All rows hold data where more than there is room for are said to.
                swiglu_fp8._launch_rowwise_backward(grad_RF, *arguments[:3], count if num_rows < R else count + 3),
                swiglu_fp8.weighted_swiglu_rowwise_backward(grad_RF, *arguments),
            )
            for way, found, beside in zip(("kernel", "op"), ways, (actual, expected), strict=True):
                act = quantize.quantize_rows_reference(beside[4][filled], False)
                wrong = same_products(tuple(x[filled] for x in found[:2]), tuple(x[filled] for x in beside[1:3]))
                wrong += same_products(tuple(x[filled] for x in found[3:]), act)
                yield f"weighted_swiglu_rowwise_backward {way} {case}", wrong
                yield f"weighted_swiglu_rowwise_backward {way}, weights {case}", far(found[2], beside[3], 1e-5) >= 1
        # The same pre-activations among others, from some row on.
        around = torch.randn(2, 2, F).bfloat16()
        among = torch.cat((around, gate_up_R2F, around))
        ways = {"kernel": (swiglu_fp8._launch_backward, actual), "op": (swiglu_fp8.weighted_swiglu_fp8_backward, expected)}
        for way, (backward, wanted) in ways.items():
            read = backward(grad_RF, among, weights_P, pair_R, count, blockwise, torch.tensor([2]))
            wrong = same_products((read[1][filled], read[2][..., filled]), (wanted[1][filled], wanted[2][..., filled]))
            wrong += sum(different(read[i][filled], wanted[i][filled]) for i in (0, 4)) + different(read[3], wanted[3])
            yield f"weighted_swiglu_fp8_backward among others, {way} {case}", wrong
        # The same packed: backward reads what E4M3 keeps of them.
        ways = (
            (packed_tokens._launch_pack, swiglu_fp8._launch_backward),
            (packed_tokens.pack_tokens, swiglu_fp8.weighted_swiglu_fp8_backward),
        )
        results = []
        for pack, backward in ways:
            packed = pack(gate_up_R2F.flatten(1), blockwise, count)
            around = packed.new_full((2, packed.shape[1]), -1)
            results.append(backward(grad_RF, torch.cat((around, packed, around)), *arguments[1:], blockwise, torch.tensor([2])))
        read, wanted = results
        for name, i in (("gate_up", 0), ("act", 4)):
            yield f"weighted_swiglu_fp8_backward packed {name} {case}", far(read[i][filled], wanted[i][filled], BF16_ROUNDING)
        yield f"weighted_swiglu_fp8_backward packed weights {case}", far(read[3], wanted[3], 1e-5)
        if not blockwise:
            own = swiglu_fp8._launch_rowwise_backward(
                grad_RF, torch.cat((around, packed, around)), *arguments[1:], torch.tensor([2])
            )
            act = quantize.quantize_rows_reference(wanted[4][filled], False)
            wrong = same_products(tuple(x[filled] for x in own[:2]), tuple(x[filled] for x in wanted[1:3]))
            wrong += same_products(tuple(x[filled] for x in own[3:]), act)
            yield f"weighted_swiglu_rowwise_backward packed {case}", wrong
        elements, scale = actual[1:3]
        own = quantize.quantize_rows_reference(actual[0][filled].flatten(1), blockwise)
        yield f"weighted_swiglu_fp8_backward quantised {case}", same_products((elements[filled], scale[..., filled]), own)


CASES = (row_cases, tile_cases, part_cases, swiglu_cases, packed_cases)

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({case: worst for cases in CASES for case, worst in cases()}))
