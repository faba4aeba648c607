"""One MoE layer, router to combine, on one GPU: time, kernel launches, memory and numbers, beside the layers of other trainers.

python benchmarks/moe_layer.py [--shapes qwen3,v3,...] [--peers torchtitan,...] [--recipes rowwise,...] [--skew] [--verbose]
    [--out FOLDER]

Every layer has the same weights and input: bf16 experts and tokens, random data, natural routing from a random gate
(softmax, normalised over the K, no shared experts). Peers keep their gate in bf16, as they train it; ours is fp32. `--recipes`
adds ours with experts in FP8, the quantisation of weights included; `rowwise+kept` keeps them quantised, `+bf16-grad` leaves
weight gradients in bf16, and `+saved` saves pre-activations in FP8. Times are medians by CUDA events with a cold L2. FLOPs:
6 R D F forward and 12 R D F backward, R = T K. The table comes last; everything is also written to OUT/moe_layer.json.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from benchmarks import environment
from benchmarks.moe_peers import PEERS, moe_args
from float8.convert import Float8Options, expert_products
from kernels.expert_mlp import expert_mlp_reference
from kernels.packed_tokens import words_of_token
from kernels.route import route_reference
from kernels.sort import sort_pairs_reference
from moe_titan.layers.moe import MoE
from parallelisms.routing import RoutingTape

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = (10, 18)  # at most, forward and backward, in bf16
RECIPES = ("rowwise", "blockwise")
KEPT, WIDE_GRAD, SAVED = "+kept", "+bf16-grad", "+saved"  # after a recipe, see above
VARIANTS = list(map("".join, product(RECIPES, ("", KEPT), ("", WIDE_GRAD), ("", SAVED))))
ERRORS = {"bf16": 1e-2, "FP8": 0.1}  # at most; E4M3 rounds by 2.6 % in the mean, and a gradient is four roundings deep
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """Model width D, expert width F, E experts, K choices, T tokens."""

    D: int
    F: int
    E: int
    K: int
    T: int

    @property
    def R(self) -> int:
        return self.T * self.K

    def saved_bytes(self, run: str = "ours") -> int:
        """What one layer saves for backward beside its parameters: see docs/moe.md."""
        of_row = 4 * words_of_token(2 * self.F, "blockwise" in run) if SAVED in run else 4 * self.F
        packed = "rowwise" in run and WIDE_GRAD not in run
        of_token = 4 * words_of_token(self.D, False) if packed else 0  # the router keeps it in bf16
        return self.R * (of_row + 20) + self.T * (2 * self.D + 4 * self.E + of_token) + 4 * self.E


SHAPES = {
    "qwen3": Shape(D=2048, F=768, E=128, K=8, T=8192),
    "qwen3-32k": Shape(D=2048, F=768, E=128, K=8, T=32768),
    "v2-lite": Shape(D=2048, F=1408, E=64, K=6, T=16384),
    "v3": Shape(D=7168, F=2048, E=32, K=8, T=8192),
    "v3-proxy": Shape(D=7168, F=2048, E=32, K=8, T=4096),  # the shape at which HybridEP publishes a layer over 8 GPUs
}


def build(shape: Shape, device: str = "cuda") -> tuple[MoE, Tensor, Tensor]:
    """Our layer, its input [1, T, D] and the gradient of its output, the same for the same shape."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = MoE(moe_args(shape.E, shape.K), shape.D, shape.F, layer="benchmark")
        layer.experts.to(torch.bfloat16)
        x, grad = (torch.randn(1, shape.T, shape.D, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return layer, x.requires_grad_(), grad


@torch.no_grad()
def send_half_to_one_expert(layer: MoE, x: Tensor) -> None:
    """A random half of the tokens gets expert 0 among its K, the others never."""
    x[..., 0] = torch.randint(0, 2, x.shape[:2], device=x.device) * 2 - 1
    layer.router.gate.weight[:, 0] = 0
    layer.router.gate.weight[0, 0] = 6  # beside logits of deviation 1


@torch.no_grad()
def empty_most_experts(layer: MoE, x: Tensor) -> None:
    """Nine experts in ten get no token, or as many as K allows."""
    E, K = layer.experts.num_experts, layer.router.options.top_k
    kept = max(E // 10, K)
    layer.expert_bias = torch.full((E,), -2.0, device=x.device)  # below any score
    layer.expert_bias[torch.arange(kept, device=x.device) * (E // kept)] = 0


SKEWS = {"half to one expert": send_half_to_one_expert, "most experts empty": empty_most_experts}

Kernels = list[tuple[str, float]]  # names and microseconds, in the order of launching


@dataclass
class Measurement:
    """Medians in ms, bytes beside weights and input (``saved_bytes`` has the input, which is saved, too)."""

    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    forward_kernels: Kernels
    backward_kernels: Kernels
    saved_bytes: int
    peak_bytes: int


def measure(layer: nn.Module, x: Tensor, grad: Tensor, shape: Shape) -> Measurement:
    inputs = [x, *layer.parameters()]
    bench = partial(do_bench, warmup=50, rep=200, return_mode="median")
    y = layer(x)
    forward_ms = bench(lambda: layer(x))
    backward_ms = bench(lambda: y.backward(grad, retain_graph=True), grad_to_none=inputs)
    flops = 6e-9 * shape.R * shape.D * shape.F
    _clear_gradients(inputs)
    kernels = kernels_of(lambda: layer(x)), kernels_of(lambda: y.backward(grad))
    _clear_gradients(inputs)
    saved, peak = memory(layer, x, grad)
    _clear_gradients(inputs)
    return Measurement(forward_ms, backward_ms, flops / forward_ms, 2 * flops / backward_ms, *kernels, saved, peak)


def _clear_gradients(inputs: list[Tensor]) -> None:
    for tensor in inputs:
        tensor.grad = None


def kernels_of(run: Callable[[], object]) -> Kernels:
    """What one call of ``run`` starts on the GPU: kernels, copies and fills."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA and not event.name.endswith(" Sync")]
    return [(event.name, event.time_range.elapsed_us()) for event in sorted(events, key=lambda event: event.time_range.start)]


def memory(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[int, int]:
    """Bytes saved for backward, the input among them, and the peak of both passes over what was there before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
    y.backward(grad)
    return saved, torch.cuda.max_memory_allocated() - before


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of each parameter."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


def repeats_bitwise(layer: nn.Module, x: Tensor, grad: Tensor) -> bool:
    return all(map(torch.equal, gradients(layer, x, grad), gradients(layer, x, grad)))


def waits_for_device(layer: nn.Module, x: Tensor, grad: Tensor) -> str | None:
    """The first operation for which the host waits for the device, if there is one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(layer, x, grad)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def replays_like_eager(layer: nn.Module, inputs: list[Tensor], grad: Tensor) -> bool:
    """Captures both passes in one CUDA graph; whether replaying it with each of the inputs gives the eager bits."""
    x = inputs[0].detach().clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(layer, x, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(layer, x, grad)
    same = []
    for other in inputs:
        with torch.no_grad():
            x.copy_(other)
        graph.replay()
        same.append(all(map(torch.equal, captured, gradients(layer, x, grad))))
    return all(same)  # after the last one, since the other ranks of a layer over several wait for it


@torch.no_grad()
def router_agreement(layer: MoE, x: Tensor) -> float:
    """The share of tokens that get the same experts as from a router in fp64."""
    router = layer.router
    wide = (x.flatten(0, 1).double(), router.gate.weight.double())
    expected_TK = route_reference(*wide, None, layer.expert_bias, None, None, router.options)[0]
    return (chosen_experts(layer, x).sort(1).values == expected_TK.sort(1).values).all(1).double().mean().item()


def chosen_experts(layer: MoE, x: Tensor) -> Tensor:
    tape = RoutingTape()
    with tape.recording():
        layer(x)
    return tape.layers[layer.layer].topk_experts_TK


def errors_against_fp64(layer: MoE, x: Tensor, grad: Tensor, tokens: int = 64) -> dict[str, float]:
    """Relative errors over a sample of tokens, which alone get a gradient."""
    sample_t, grad_of_sample = sample(grad, tokens)
    y, grad_x, *weights = gradients(layer, x, grad_of_sample)
    expected = exact_gradients(layer, x[0, sample_t], chosen_experts(layer, x)[sample_t], grad[0, sample_t])
    return relative_errors([y[0, sample_t], grad_x[0, sample_t], *weights], expected)


def sample(grad: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and a gradient that is zero for all others."""
    sample_t = torch.randperm(grad.shape[1], device=grad.device)[:tokens]
    return sample_t, torch.zeros_like(grad).index_copy(1, sample_t, grad[:, sample_t])


def exact_gradients(layer: MoE, x_tD: Tensor, chosen_tK: Tensor, grad_tD: Tensor) -> list[Tensor]:
    """What :func:`gradients` gives for tokens and the experts that they chose, by a loop over all experts in fp64."""
    exact = (x_tD, layer.router.gate.weight, layer.experts.w13, layer.experts.w2)
    wide = [tensor.detach().double().requires_grad_() for tensor in exact]
    y_tD = layer_reference(*wide, chosen_tK, layer.router.options)
    return [y_tD.detach(), *torch.autograd.grad(y_tD, wide, grad_tD.double())]


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Of what :func:`gradients` gives; of experts' weights those of the worst expert."""
    found = {}
    for name, *pair in zip(("y", "x", "gate", "w13", "w2"), actual, expected, strict=True):
        found[name] = max(map(relative_error, *pair)) if name in ("w13", "w2") else relative_error(*pair)
    return found


def layer_reference(x_TD: Tensor, gate_ED: Tensor, w13: Tensor, w2: Tensor, chosen_TK: Tensor, options) -> Tensor:
    """The layer in plain PyTorch for the experts that tokens chose, in the dtype of its arguments."""
    _, weights_TK, _ = route_reference(x_TD, gate_ED, None, None, None, chosen_TK, options)
    pair_R, _, _, offsets_E = sort_pairs_reference(chosen_TK.flatten(), len(gate_ED))
    rows_RD = expert_mlp_reference(x_TD, w13, w2, weights_TK.flatten(), pair_R, offsets_E)
    return torch.zeros_like(x_TD).index_add(0, pair_R.long() // options.top_k, rows_RD)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm and in fp64; infinite where it is no number."""
    wide = expected.detach().double()
    error = ((actual.detach().double() - wide).norm() / wide.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def check(layer: MoE, x: Tensor, grad: Tensor) -> dict[str, Any]:
    others = [torch.randn_like(x) for _ in range(2)]
    return {
        "repeats_bitwise": repeats_bitwise(layer, x, grad),
        "waits_for_device": waits_for_device(layer, x, grad),
        "graph_equals_eager": replays_like_eager(layer, [x, *others], grad),
        "router_agreement": router_agreement(layer, x),
        "errors": errors_against_fp64(layer, x, grad),
    }


def failures(entry: dict[str, Any]) -> list[str]:
    """What one of our runs did not keep."""
    if "error" in entry:
        return [entry["error"]]
    checks, launches = entry["checks"], (len(entry["forward_kernels"]), len(entry["backward_kernels"]))
    formula = SHAPES[entry["shape"]].saved_bytes(entry["run"])
    low_precision = entry["run"].removeprefix("ours, ") in VARIANTS
    most, limits = (ERRORS["FP8"], (math.inf, math.inf)) if low_precision else (ERRORS["bf16"], LAUNCHES)
    kept = {
        "two runs differ": checks["repeats_bitwise"],
        f"waits for the device: {checks['waits_for_device']}": checks["waits_for_device"] is None,
        "CUDA graph differs from eager": checks["graph_equals_eager"],
        f"router agrees with fp64 on {checks['router_agreement']:.4%}": checks["router_agreement"] > 0.999,
        f"errors against fp64 {checks['errors']}": max(checks["errors"].values()) < most,
        f"launches {launches} of at most {limits}": all(0 < n <= limit for n, limit in zip(launches, limits, strict=True)),
        f"saves {entry['saved_bytes']:,} bytes, by formula {formula:,}": abs(entry["saved_bytes"] / formula - 1) < 0.01,
    }
    return [what for what, holds in kept.items() if not holds]


@torch.no_grad()
def load(layer: MoE, x: Tensor) -> dict[str, float]:
    """The largest share of the tokens that one expert gets, and the share of experts without any."""
    counts_E = torch.bincount(chosen_experts(layer, x).flatten(), minlength=layer.experts.num_experts)
    return {"largest": counts_E.max().item() / x.shape[1], "empty": (counts_E == 0).double().mean().item()}


def run_ours(name: str, skew: str | None = None, recipe: str | None = None) -> dict[str, Any]:
    layer, x, grad = build(SHAPES[name])
    if recipe is not None:
        options = Float8Options(expert_weight_grad_bf16=WIDE_GRAD in recipe, save_activations=SAVED in recipe)
        layer.experts.products = expert_products(recipe.split("+")[0], options)
    if skew is not None:
        SKEWS[skew](layer, x)
    with layer.experts.products.keeping_weights() if recipe is not None and KEPT in recipe else nullcontext():
        result = asdict(measure(layer, x, grad, SHAPES[name]))
        return result | {"load": load(layer, x), "checks": check(layer, x, grad)}


def run_peer(name: str, peer: str) -> dict[str, Any]:
    """``difference``: the median token's relative difference to our output; a bf16 gate sends some tokens elsewhere."""
    ours, x, grad = build(SHAPES[name])
    with PEERS[peer](ours) as layer:
        y, expected = layer(x).detach().float(), ours(x).detach().float()
        difference = ((y - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
        del y, expected
        return asdict(measure(layer, x, grad, SHAPES[name])) | {"difference": difference}


def attempt(shape: str, run: str, work: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """One run, which may fail without taking the others along."""
    begin = time.monotonic()
    try:
        outcome = work(shape)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}".strip()}
    torch.cuda.empty_cache()
    outcome["seconds"] = time.monotonic() - begin
    print(f"{shape}, {run}: {outcome.get('error', 'done')} ({outcome['seconds']:.1f} s)", flush=True)
    return {"shape": shape, "run": run} | outcome


_HEAD = "shape,run,fwd ms,TFLOP/s,bwd ms,TFLOP/s,launches,on GPU ms,saved MiB,peak MiB,x ours".split(",")


def table(entries: list[dict[str, Any]]) -> str:
    """A row per run; the last column is the time of both passes over that of ours under its natural load."""
    ours = {entry["shape"]: _total(entry) for entry in entries if entry["run"] == "ours" and "error" not in entry}
    return aligned([_HEAD, *(_row(entry, ours.get(entry["shape"])) for entry in entries)], 2)


def aligned(rows: list[list[str]], left: int) -> str:
    """Lines of the rows, whose first ``left`` columns begin where others end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [(str.ljust if i < left else str.rjust, width) for i, width in enumerate(widths)]
    return "\n".join("  ".join(adjust(cell, width) for cell, (adjust, width) in zip(row, columns, strict=True)) for row in rows)


def _row(entry: dict[str, Any], ours_ms: float | None) -> list[str]:
    row = [entry["shape"], entry["run"]]
    if "error" in entry:
        return row + ["failed"] + ["-"] * (len(_HEAD) - 3)
    kernels = entry["forward_kernels"], entry["backward_kernels"]
    for direction in ("forward", "backward"):
        row += [f"{entry[f'{direction}_ms']:.3f}", f"{entry[f'{direction}_tflops']:.0f}"]
    row.append(" + ".join(str(len(each)) for each in kernels))
    row.append(" + ".join(f"{sum(us for _, us in each) / 1e3:.3f}" for each in kernels))
    row += [f"{entry['saved_bytes'] / MIB:,.1f}", f"{entry['peak_bytes'] / MIB:,.1f}"]
    return row + [f"{_total(entry) / ours_ms:.2f}" if ours_ms else "-"]


def _total(entry: dict[str, Any]) -> float:
    return entry["forward_ms"] + entry["backward_ms"]


def numbers(entry: dict[str, Any]) -> str:
    """What a run showed beside its times."""
    label = f"{entry['shape']}, {entry['run']}:"
    if "error" in entry:
        return f"{label} {entry['error']}"
    if "difference" in entry:
        return f"{label} median token differs from ours by {entry['difference']:.1e}"
    checks, spread = entry["checks"], entry["load"]
    errors = ", ".join(f"{name} {error:.1e}" for name, error in checks["errors"].items())
    formula = SHAPES[entry["shape"]].saved_bytes() / MIB
    return (
        f"{label} largest load {spread['largest']:.1%} of the tokens, {spread['empty']:.0%} of experts empty; router agrees with "
        f"fp64 on {checks['router_agreement']:.4%}; errors {errors}; {formula:,.1f} MiB saved by formula; "
        f"{'; '.join(failures(entry)) or 'all checks passed'}"
    )


def kernel_list(entry: dict[str, Any]) -> str:
    lines = [f"{entry['shape']}, {entry['run']}:"]
    for direction in ("forward", "backward"):
        lines.append(f"  {direction}")
        lines += [f"{us:10.1f} us  {name[:120]}" for name, us in entry[f"{direction}_kernels"]]
    return "\n".join(lines)


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"drawn from {', '.join(SHAPES)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"drawn from {', '.join(PEERS)}; empty for none")
    parser.add_argument("--recipes", default="", help=f"ours with FP8 experts, too: drawn from {', '.join(VARIANTS)}")
    parser.add_argument("--skew", action="store_true", help="ours under skewed loads, too")
    parser.add_argument("--verbose", action="store_true", help="list every kernel and its time")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/moe_layer", help="folder for the results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    options.shapes = options.shapes.split(",")
    options.peers = [peer for peer in options.peers.split(",") if peer]
    options.recipes = [recipe for recipe in options.recipes.split(",") if recipe]
    known_of = {"shapes": SHAPES, "peers": PEERS, "recipes": VARIANTS}
    for key, known in known_of.items():
        chosen = getattr(options, key)
        if unknown := set(chosen) - set(known):
            parser.error(f"--{key}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return options


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    if not torch.cuda.is_available():
        print("benchmarks/moe_layer.py measures a GPU, and torch finds none: run it where nvidia-smi lists one", file=sys.stderr)
        return 2
    report = environment.report(["python", "benchmarks/moe_layer.py", *argv], options.commit)
    # Ours first and the slow compilations last, so that a run cut short has lost the least.
    runs: dict[str, Callable[[str], dict[str, Any]]] = {"ours": run_ours}
    runs |= {f"ours, {recipe}": partial(run_ours, recipe=recipe) for recipe in options.recipes}
    if options.skew:
        runs |= {f"ours, {skew}": partial(run_ours, skew=skew) for skew in SKEWS}
    runs |= {peer: partial(run_peer, peer=peer) for peer in options.peers}
    entries: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for run, work in runs.items():
        for shape in options.shapes:
            entries.append(attempt(shape, run, work))
            (options.out / "moe_layer.json").write_text(json.dumps(report | {"results": entries}, indent=1) + "\n")
    if options.verbose:
        print("\n" + "\n".join(kernel_list(entry) for entry in entries if "error" not in entry))
    print("\n" + "\n".join(map(numbers, entries)))
    print(f"\n{environment.heading(report)}\n")
    print(table(sorted(entries, key=lambda entry: options.shapes.index(entry["shape"]))))
    return int(any(failures(entry) for entry in entries if entry["run"].startswith("ours")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
