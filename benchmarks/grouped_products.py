"""The experts' grouped products alone, in bf16 and FP8, beside torch's and torchao's.

python benchmarks/grouped_products.py [--shapes qwen3,v3,...] [--out FOLDER]

The two weights of an expert layer at the shapes of benchmarks/moe_layer.py, with groups as of random scores. Two tables: TFLOP/s
of each product with operands given in its format, where "torch" is `torch._scaled_grouped_mm` with a scale a row and fast
accumulation on groups that are multiples of 16; and ms from bf16 operands, quantisation included, of the forward product and of
both gradients together, where "torchao" is its rowwise grouped product on such groups. Times are medians by CUDA events with a
cold L2; operands are random. Everything is also written to OUT/grouped_products.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
from torch import Tensor
from triton.testing import do_bench

from benchmarks import environment
from benchmarks.moe_layer import RECIPES, SHAPES, Shape, aligned
from float8.convert import Float8Options, expert_products
from kernels.expert_mlp import HIGH_PRECISION, Products
from kernels.grouped_mm_fp8 import grouped_mm_fp8, grouped_mm_fp8_weight_grad
from kernels.quantize import quantize_columns, quantize_rows, quantize_weights
from kernels.turn_rows import turn_rows

ROOT = Path(__file__).resolve().parents[1]
E4M3 = torch.float8_e4m3fn
Runs = dict[str, Callable[[], object]]  # what to measure, by the product and the column of a table, "product/column"


def sizes_of_groups(shape: Shape, multiple: int, device: str) -> Tensor:
    """Tokens that each expert gets by random scores, rounded up."""
    generator = torch.Generator().manual_seed(0)
    chosen_TK = torch.rand(shape.T, shape.E, generator=generator).topk(shape.K, dim=1).indices
    counts_E = torch.bincount(chosen_TK.flatten(), minlength=shape.E)
    return ((counts_E + multiple - 1) // multiple * multiple).to(device)


def weights(shape: Shape) -> dict[str, tuple[int, int]]:
    """Sizes N (summed over by the input gradient) and K (summed over by the output) of an expert's matrices."""
    return {"w13": (2 * shape.F, shape.D), "w2": (shape.D, shape.F)}


def operands(N: int, K: int, groups_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, gradients of the output, weights and ends of the groups."""
    R, make = int(groups_E.sum()), partial(torch.randn, dtype=torch.bfloat16, device=groups_E.device)
    return make(R, K), make(R, N), make(len(groups_E), N, K), groups_E.cumsum(0, dtype=torch.int32)


def of_weight_grad(rows: Tensor, ends_E: Tensor, blockwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Elements, scales, and ends of the groups among them, as the experts' products make them of bf16 rows."""
    if blockwise:
        return quantize_columns(rows, ends_E, True)
    return turn_rows(*quantize_rows(rows, ends_E[-1:], False), ends_E)


def given(x_RK: Tensor, grad_RN: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Runs:
    """Our products with operands in their format."""
    runs: Runs = {
        "output/bf16": lambda: HIGH_PRECISION.output(x_RK, w_ENK, ends_E),
        "input grad/bf16": lambda: HIGH_PRECISION.input_grad(grad_RN, w_ENK, ends_E),
        "weight grad/bf16": lambda: HIGH_PRECISION.weight_grad(grad_RN, x_RK, ends_E),
    }
    for recipe in RECIPES:
        blockwise = recipe == "blockwise"
        for name, rows, transposed in (("output", x_RK, False), ("input grad", grad_RN, True)):
            pair = *quantize_rows(rows, ends_E[-1:], blockwise), *quantize_weights(w_ENK, blockwise, transposed)
            runs[f"{name}/{recipe}"] = partial(grouped_mm_fp8, *pair, ends_E, blockwise)
        (grad_NW, grad_scale, _), columns = (of_weight_grad(rows, ends_E, blockwise) for rows in (grad_RN, x_RK))
        runs[f"weight grad/{recipe}"] = partial(grouped_mm_fp8_weight_grad, grad_NW, grad_scale, *columns, blockwise)
    return runs


def given_to_torch(x_RK: Tensor, grad_RN: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Runs:
    (E, N, K), R = w_ENK.shape, len(x_RK)
    of_rows, of_N, of_K = (torch.ones(size, device=x_RK.device) for size in ((R,), (E, N), (E, K)))
    scaled = partial(torch._scaled_grouped_mm, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=True)
    rows, grads = x_RK.to(E4M3), grad_RN.to(E4M3)
    by_N, by_K = w_ENK.to(E4M3).transpose(1, 2), w_ENK.transpose(1, 2).contiguous().to(E4M3).transpose(1, 2)
    grads_NR, rows_RK = grad_RN.t().contiguous().to(E4M3), x_RK.t().contiguous().to(E4M3).t()
    return {
        "output/torch": lambda: scaled(rows, by_N, of_rows, of_N),
        "input grad/torch": lambda: scaled(grads, by_K, of_rows, of_K),
        "weight grad/torch": lambda: scaled(grads_NR, rows_RK, of_N.flatten(), of_K.flatten()),
    }


def from_bf16(x_RK: Tensor, grad_RN: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Runs:
    """Our products with everything that quantises their operands; of rowwise rows, which training has from forward, too."""

    def backward(products: Products) -> None:
        operand, grad = products.output_grad(grad_RN, ends_E[-1:])
        products.input_grad(operand, w_ENK, ends_E)
        products.weight_grad(grad, x_RK, ends_E)

    kinds = {"bf16": HIGH_PRECISION} | {recipe: expert_products(recipe, Float8Options()) for recipe in RECIPES}
    runs: Runs = {}
    for kind, products in kinds.items():
        runs[f"forward/{kind}"] = partial(products.output, x_RK, w_ENK, ends_E)
        runs[f"backward/{kind}"] = partial(backward, products)
    return runs


def from_bf16_by_torchao(x_RK: Tensor, grad_RN: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Runs:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    product = partial(_to_fp8_rowwise_then_scaled_grouped_mm, offs=ends_E, pad_token_groups_for_grouped_mm=False)
    leaves = x_RK.requires_grad_(), w_ENK.requires_grad_()
    out_RN = product(leaves[0], leaves[1].transpose(1, 2))
    return {
        "forward/torchao": lambda: product(leaves[0], leaves[1].transpose(1, 2)),
        "backward/torchao": lambda: torch.autograd.grad(out_RN, leaves, grad_RN, retain_graph=True),
    }


def measure(runs: Runs) -> dict[str, float | None]:
    """ms by run; None where it fails, which is printed."""
    found: dict[str, float | None] = {}
    for name, run in runs.items():
        try:
            found[name] = do_bench(run, warmup=10, rep=60, return_mode="median")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            found[name] = None
    return found


def measure_weight(shape: Shape, N: int, K: int) -> dict[str, float | None]:
    """ms of every run."""
    found: dict[str, float | None] = {}
    for multiple, kinds in ((1, (given, from_bf16)), (16, (given_to_torch, from_bf16_by_torchao))):
        tensors = operands(N, K, sizes_of_groups(shape, multiple, "cuda"))
        for kind in kinds:
            found |= measure(kind(*tensors))
    return found


def tables(results: dict[str, dict[str, float | None]]) -> str:
    """``results``: ms of the runs, by "shape/weight"."""
    rates = [["weight", "product", "bf16", *RECIPES, "torch"]]
    times = [["weight", "direction", "bf16", *RECIPES, "torchao"]]
    for weight, ms in results.items():
        shape = SHAPES[weight.split("/")[0]]
        N, K = weights(shape)[weight.split("/")[1]]
        for product in ("output", "input grad", "weight grad"):
            found = [ms[f"{product}/{column}"] for column in rates[0][2:]]
            rates.append([weight, product, *(f"{2e-9 * shape.R * N * K / time:.0f}" if time else "-" for time in found)])
        for direction in ("forward", "backward"):
            found = [ms[f"{direction}/{column}"] for column in times[0][2:]]
            times.append([weight, direction, *(f"{time:.3f}" if time else "-" for time in found)])
    return f"TFLOP/s, operands given\n{aligned(rates, 2)}\n\nms, from bf16\n{aligned(times, 2)}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"drawn from {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/grouped_products", help="folder for the results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    shapes = options.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"--shapes: unknown {', '.join(unknown)}; choose from {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        print("benchmarks/grouped_products.py measures a GPU, and torch finds none", file=sys.stderr)
        return 2
    report = environment.report(["python", "benchmarks/grouped_products.py", *argv], options.commit)
    torch.manual_seed(0)
    results = {
        f"{name}/{weight}": measure_weight(SHAPES[name], *sizes)
        for name in shapes
        for weight, sizes in weights(SHAPES[name]).items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "grouped_products.json").write_text(json.dumps(report | {"ms": results}, indent=1) + "\n")
    print(f"{environment.heading(report)}\n\n{tables(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
