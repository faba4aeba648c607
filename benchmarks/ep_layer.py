"""One MoE layer, router to combine, with its experts over the GPUs of one host, beside torchtitan's under its ExpertParallel.

torchrun --nproc-per-node 2 benchmarks/ep_layer.py [--shapes qwen3,...] [--runs nvlink,...] [--skew] [--out FOLDER]

Every rank has the shape's T tokens and an equal share of its experts: bf16, random data, natural routing from a random gate (see
benchmarks/moe_layer.py; torchtitan's gate is in bf16). nvlink and alltoall are first compared with each other and with a loop
over the experts in fp64. Times are medians by CUDA events, of the slowest rank; backward is that of one forward pass, over and
over, in a CUDA graph both passes less forward. FLOPs of a rank: 6 R D F forward and 12 R D F backward, R = T K. Peak memory is
what torch allocates in both passes beside weights and input, without what dispatchers keep for all layers. Launches are kernels,
copies and fills. The table comes last; everything is also written to OUT/ep_layer.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import environment, moe_layer, ranks
from benchmarks.moe_layer import SHAPES, Shape, gradients
from benchmarks.moe_peers import moe_args, torchtitan_compiled, torchtitan_layer
from moe_titan.layers.moe import MoE
from parallelisms.dispatch import build_dispatcher

ROOT = Path(__file__).resolve().parents[1]
DISPATCHERS = ("nvlink", "alltoall")
PEERS = {"torchtitan": torchtitan_layer, "torchtitan-compiled": torchtitan_compiled}


@torch.no_grad()
def send_all_to_first_rank(layer: MoE, x: Tensor) -> None:
    """No token chooses an expert of another rank, as long as the first has K of them."""
    E, K = layer.experts.num_experts, layer.router.options.top_k
    layer.expert_bias = torch.zeros(E, device=x.device)
    layer.expert_bias[max(E // dist.get_world_size(), K) :] = -2  # below any score


NATURAL = "natural"
LOADS: dict[str, Callable[[MoE, Tensor], None]] = {
    NATURAL: lambda layer, x: None,
    "half to one expert": moe_layer.send_half_to_one_expert,
    "all to one rank": send_all_to_first_rank,
}


class Case(NamedTuple):
    """The layer with all of its experts, the same on every rank, and the rank's own input and gradient of the output."""

    shape: Shape
    whole: MoE
    x: Tensor
    grad: Tensor

    def layer(self, kind: str) -> MoE:
        """The rank's share: its experts' weights are views into those of the whole."""
        whole, world, rank = self.whole, dist.get_world_size(), dist.get_rank()
        with torch.device("meta"):
            layer = MoE(moe_args(self.shape.E, self.shape.K), self.shape.D, self.shape.F, whole.layer)
        layer.router, layer.expert_bias = whole.router, whole.expert_bias
        for name, weight in whole.experts.named_parameters():
            setattr(layer.experts, name, nn.Parameter(weight.detach().chunk(world)[rank]))
        layer.dispatcher = build_dispatcher(kind, self.shape.E, dist.group.WORLD, world, 1, self.shape.T)
        return layer


def build(shape: Shape, load: str, device: str = "cuda") -> Case:
    if shape.E % dist.get_world_size():
        raise ValueError(f"{shape.E} experts over {dist.get_world_size()} ranks: start a number of processes that divides them")
    whole, x, grad = moe_layer.build(shape, device)
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        x.normal_(), grad.normal_()
    LOADS[load](whole, x)
    return Case(shape, whole, x, grad)


def gathered(own: Tensor) -> Tensor:
    """Those of all ranks, one after the other."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def everywhere(holds: bool) -> bool:
    return ranks.slowest(not holds) == 0


def worst(errors: dict[str, float]) -> dict[str, float]:
    return {name: ranks.slowest(error) for name, error in errors.items()}


def errors_against_fp64(case: Case, layer: MoE, tokens: int = 64) -> dict[str, float]:
    """As in benchmarks/moe_layer.py, over a sample of every rank's tokens; the gate's gradients are added up."""
    sample_t, grad_of_sample = moe_layer.sample(case.grad, tokens)
    y, grad_x, grad_gate, *grad_experts = gradients(layer, case.x, grad_of_sample)
    dist.all_reduce(grad_gate)
    chosen_TK = moe_layer.chosen_experts(layer, case.x)
    inputs = (gathered(each[sample_t]) for each in (case.x[0].detach(), chosen_TK, case.grad[0]))
    exact_y, exact_x, exact_gate, *exact_experts = moe_layer.exact_gradients(case.whole, *inputs)
    world, rank = dist.get_world_size(), dist.get_rank()
    expected = [exact.chunk(world)[rank] for exact in (exact_y, exact_x, *exact_experts)]
    expected.insert(2, exact_gate)
    return moe_layer.relative_errors([y[0, sample_t], grad_x[0, sample_t], grad_gate, *grad_experts], expected)


def check(case: Case) -> dict[str, Any]:
    """Numbers of our dispatchers; waiting and CUDA graphs on GPUs alone."""
    x, grad, layers = case.x, case.grad, {kind: case.layer(kind) for kind in DISPATCHERS}
    nvlink, alltoall = (gradients(layer, x, grad) for layer in layers.values())
    found: dict[str, Any] = {"errors": {"nvlink against alltoall": worst(moe_layer.relative_errors(nvlink, alltoall))}}
    found["repeats_bitwise"] = {}
    for kind, layer in layers.items():
        found["errors"][f"{kind} against fp64"] = worst(errors_against_fp64(case, layer))
        found["repeats_bitwise"][kind] = everywhere(moe_layer.repeats_bitwise(layer, x, grad))
    if x.is_cuda:
        # Other tokens, and one token over and over, which leaves most experts empty.
        inputs = [x, torch.randn_like(x), x.detach()[:, :1].expand_as(x).contiguous()]
        found["waits_for_device"] = moe_layer.waits_for_device(layers["nvlink"], x, grad)
        found["graph_equals_eager"] = everywhere(moe_layer.replays_like_eager(layers["nvlink"], inputs, grad))
    return found


def failures(entry: dict[str, Any]) -> list[str]:
    """What a run or a check did not keep."""
    if "error" in entry:
        return [entry["error"]]
    if entry["run"] != "check":
        return []
    kept = {f"{what}: {errors}": max(errors.values()) < 1e-2 for what, errors in entry["errors"].items()}
    kept |= {f"two runs of {kind} differ": same for kind, same in entry["repeats_bitwise"].items()}
    kept["CUDA graph differs from eager"] = entry["graph_equals_eager"]
    kept[f"nvlink waits for the device: {entry['waits_for_device']}"] = entry["waits_for_device"] is None
    return [what for what, holds in kept.items() if not holds]


def measure(layer: nn.Module, case: Case) -> dict[str, Any]:
    inputs = [case.x, *layer.parameters()]
    times_us, launches = _eager_passes(layer, case, inputs)
    peak = moe_layer.memory(layer, case.x, case.grad)[1]
    for tensor in inputs:
        tensor.grad = None
    return _result(case.shape, *times_us, launches, peak)


def _eager_passes(layer: nn.Module, case: Case, inputs: list[Tensor]) -> tuple[list[float], list[int]]:
    forward = partial(layer, case.x)
    backward = partial(torch.autograd.grad, forward(), inputs, case.grad, retain_graph=True)
    passes = (forward, backward)
    return [ranks.eager(each) for each in passes], [len(moe_layer.kernels_of(each)) for each in passes]


def measure_graph(layer: nn.Module, case: Case) -> dict[str, Any]:
    x, inputs = case.x, [case.x, *layer.parameters()]
    forward_us = ranks.graphed(lambda: layer(x))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both_us = ranks.graphed(lambda: torch.autograd.grad(layer(x), inputs, case.grad))
    peak = torch.cuda.max_memory_allocated() - before
    return _result(case.shape, forward_us, both_us - forward_us, [1], peak)


def _result(shape: Shape, forward_us: float, backward_us: float, launches: list[int], peak: int) -> dict[str, Any]:
    flops = 6e-6 * shape.R * shape.D * shape.F
    return {
        "forward_ms": forward_us / 1e3,
        "backward_ms": backward_us / 1e3,
        "forward_tflops": flops / forward_us,
        "backward_tflops": 2 * flops / backward_us,
        "launches": launches,
        "peak_bytes": int(ranks.slowest(peak)),
    }


def difference(case: Case, layer: nn.Module) -> float:
    """The median token's relative difference to our output; a bf16 gate sends some tokens elsewhere."""
    y, expected = (each(case.x).detach().float() for each in (layer, case.layer("alltoall")))
    return ranks.slowest(((y - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item())


def run_peer(case: Case, peer: str) -> dict[str, Any]:
    ep = init_device_mesh(case.x.device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    with PEERS[peer](case.whole, ep) as layer:
        return {"difference": difference(case, layer)} | measure(layer, case)


# The slow compilations last, so that a run cut short has lost the least.
RUNS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "nvlink": lambda case: measure(case.layer("nvlink"), case),
    "nvlink-graph": lambda case: measure_graph(case.layer("nvlink"), case),
    "alltoall": lambda case: measure(case.layer("alltoall"), case),
    **{peer: partial(run_peer, peer=peer) for peer in PEERS},
}


def details(entry: dict[str, Any]) -> str:
    """What a run showed beside its times."""
    label = f"{entry['shape']}, {entry['load']}, {entry['run']}:"
    if failed := failures(entry):
        return f"BAD {label} {'; '.join(failed)}"
    if entry["run"] == "check":
        errors = [f"{what} {', '.join(f'{k} {e:.1e}' for k, e in each.items())}" for what, each in entry["errors"].items()]
        return f"ok  {label} {'; '.join(errors)}; runs repeat bitwise, no host sync, CUDA graph as eager with other routing"
    apart = f", median token differs from ours by {entry['difference']:.1e}" if "difference" in entry else ""
    return f"ok  {label} {entry['forward_ms']:.3f} + {entry['backward_ms']:.3f} ms{apart}"


_HEAD = "shape,load,run,fwd ms,TFLOP/s,bwd ms,TFLOP/s,launches,peak MiB,x torchtitan".split(",")


def table(entries: list[dict[str, Any]]) -> str:
    """A row per run; the last column is how many times as fast both passes are as torchtitan's fastest."""
    peers: dict[tuple[str, str], float] = {}
    timed = [entry for entry in entries if entry["run"] != "check"]
    for entry in timed:
        if entry["run"] in PEERS and "error" not in entry:
            place = entry["shape"], entry["load"]
            peers[place] = min(_total(entry), peers.get(place, float("inf")))
    return moe_layer.aligned([_HEAD, *(_row(entry, peers.get((entry["shape"], entry["load"]))) for entry in timed)], 3)


def _row(entry: dict[str, Any], peer_ms: float | None) -> list[str]:
    row = [entry["shape"], entry["load"], entry["run"]]
    if "error" in entry:
        return row + ["failed"] + ["-"] * (len(_HEAD) - 4)
    for direction in ("forward", "backward"):
        row += [f"{entry[f'{direction}_ms']:.3f}", f"{entry[f'{direction}_tflops']:.0f}"]
    row += [" + ".join(map(str, entry["launches"])), f"{entry['peak_bytes'] / moe_layer.MIB:,.0f}"]
    return row + [f"{peer_ms / _total(entry):.2f}" if peer_ms else "-"]


def _total(entry: dict[str, Any]) -> float:
    return entry["forward_ms"] + entry["backward_ms"]


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3,qwen3-32k", help=f"drawn from {', '.join(SHAPES)}")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"drawn from {', '.join(RUNS)}")
    parser.add_argument("--skew", action="store_true", help=f"under skewed loads, too: {', '.join(list(LOADS)[1:])}")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/ep_layer", help="folder for the results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    options.shapes, options.runs = options.shapes.split(","), options.runs.split(",")
    for key, chosen, known in (("shapes", options.shapes, SHAPES), ("runs", options.runs, RUNS)):
        if unknown := set(chosen) - set(known):
            parser.error(f"--{key}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return options


def run_all(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Checks, then runs; what there is so far is printed and written after each."""
    runs = {"check": check} | {run: work for run, work in RUNS.items() if run in options.runs}
    loads = list(LOADS) if options.skew else [NATURAL]
    entries: list[dict[str, Any]] = []
    for run, work in runs.items():
        for load in loads:
            for shape in options.shapes:
                entry = moe_layer.attempt(shape, run, lambda name, load=load, work=work: work(build(SHAPES[name], load)))
                entries.append({"load": load} | entry)
                print(details(entries[-1]), flush=True)
                if "error" in entry:
                    print(f"rank {dist.get_rank()}: {shape}, {load}, {run}: {entry['error']}", file=sys.stderr)
                if dist.get_rank() == 0:
                    (options.out / "ep_layer.json").write_text(json.dumps(report | {"results": entries}, indent=1) + "\n")
    return sorted(entries, key=lambda entry: (options.shapes.index(entry["shape"]), loads.index(entry["load"])))


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    if reason := ranks.missing("benchmarks/ep_layer.py"):
        print(reason, file=sys.stderr)
        return 2
    ranks.join()
    command = ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "benchmarks/ep_layer.py", *argv]
    report = environment.report(command, options.commit)
    options.out.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if dist.get_rank() else sys.stdout):
        entries = run_all(options, report)
        print(f"\n{environment.heading(report)}\n\n{table(entries)}", flush=True)
    dist.destroy_process_group()
    return int(any(map(failures, entries)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
