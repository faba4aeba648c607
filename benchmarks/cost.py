"""Cost as the work grows: training steps on one GPU with longer sequences, more of them, more experts, more layers.

python benchmarks/cost.py [--points sequence,batch,experts,layers] [--layers 2] [--seconds 120] [--compile]

The base is Qwen3-30B-A3B with 2 layers at 4 x 4096 tokens. All points are measured in one process, an engine after the other:
sequences of 4k to 64k tokens at 64k tokens a step, 1 to 8 sequences of 4k, 32 to 256 experts and 1 to 8 layers. Tokens are
random, routing is natural, top-k stays 8, nothing is recomputed; weights, moments and head are those of training.

Nothing is compiled, since every size would compile again, for longer than it is measured: norms and rotary embeddings take longer
than in the trainer, at every point the same time per token and layer. `--compile` compiles.

A point that runs out of memory, or for which no time is left, is reported as such. Everything is written to OUT/cost.json, and
plotted in OUT/cost.svg.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as benchmarks/train_step.py sets it

import torch
import torch.distributed as dist

from benchmarks import environment
from benchmarks.svg_plot import Chart, svg
from moe_titan.config import Config, build_model_args, load_config
from moe_titan.data import MicroBatch
from moe_titan.engine import Engine
from moe_titan.flops import peak_flops, train_flops_per_token
from moe_titan.metrics import peak_memory_gib
from moe_titan.trainer import build_engine, layout_of, start_processes
from parallelisms.folded_mesh import FoldedMesh

ROOT = Path(__file__).resolve().parents[1]
ALONE = {"parallelism.tensor_parallel_degree": 1, "parallelism.data_parallel_shard_degree": 1}
ALONE |= {"parallelism.expert_parallel_degree": 1, "activation_checkpoint.mode": "none", "training.tokenizer": "byte"}
LR = 1e-4


@dataclass(frozen=True)
class Point:
    """Sizes of a model and of a step's only micro-batch."""

    seq_len: int
    batch: int
    experts: int
    layers: int


@dataclass
class Result:
    """What a point gave; without numbers where it failed. ``seconds`` are of all of it, building and warming up included."""

    tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None  # peak; on the CPU of the process up to here
    seconds: float = 0.0
    error: str | None = None


def sweeps(unit: int, layers: int) -> dict[str, dict[int, Point]]:
    """By sweep, the points by what grows, for sequences of ``unit`` tokens and a base of so many layers."""
    return {
        "sequence": {unit * k: Point(unit * k, 16 // k, 128, layers) for k in (1, 2, 4, 8, 16)},
        "batch": {batch: Point(unit, batch, 128, layers) for batch in (1, 2, 4, 8)},
        "experts": {experts: Point(unit, 4, experts, layers) for experts in (32, 64, 128, 256)},
        "layers": {count: Point(unit, 4, 128, count) for count in (1, 2, 4, 8)},
    }


def configure(point: Point, options: argparse.Namespace) -> Config:
    flags = ALONE | {
        "config": options.config,
        "training.seq_len": point.seq_len,
        "training.local_batch_size": point.batch,
        "training.global_batch_size": point.batch,
        "model.overrides.n_layers": point.layers,
        "model.overrides.moe_args.num_experts": point.experts,
        "compile.enable": str(options.compile).lower(),
    }
    return load_config([word for key, value in flags.items() for word in (f"--{key}", str(value))], 1)


def measure(point: Point, options: argparse.Namespace, mesh: FoldedMesh, device: torch.device) -> Result:
    """Builds the point's engine and times its steps, or says why it could not."""
    begin, result = time.perf_counter(), Result()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        config = configure(point, options)
        args = build_model_args(config)
        engine = build_engine(config, args, mesh, device, eos_id=0)
        speed = point.batch * point.seq_len / step_seconds(engine, point, options)
        flops = speed * train_flops_per_token(args, point.seq_len)
        peak = peak_flops(environment.hardware()[0])
        result = Result(speed, flops / 1e12, flops / peak if peak else None, peak_memory_gib(device))
    except torch.OutOfMemoryError:
        result.error = "out of memory"
    result.seconds = time.perf_counter() - begin
    return result


def step_seconds(engine: Engine, point: Point, options: argparse.Namespace) -> float:
    """Mean time of the timed steps, which the host gives to the device without waiting in between."""
    batches = [_batch(point, engine.args.vocab_size, engine.device.type == "cuda") for _ in range(options.warmup + options.steps)]
    for batch in batches[: options.warmup]:
        engine.step([batch], LR).wait()
    begin = time.perf_counter()
    for batch in batches[options.warmup :]:
        result = engine.step([batch], LR)
    result.wait()
    return (time.perf_counter() - begin) / options.steps


def _batch(point: Point, vocab_size: int, pin: bool) -> MicroBatch:
    tokens_BS = torch.randint(vocab_size, (point.batch, point.seq_len + 1))
    halves = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
    return MicroBatch(*(half.pin_memory() if pin else half for half in halves))


def free_memory() -> None:
    """Gives back what the last point's engine held."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def line(sweep: str, size: int, result: Result) -> str:
    numbers = result.error or (
        f"{result.tokens_per_second:12,.0f} tokens/s {result.tflops:8.1f} TFLOP/s {result.memory_gib:7.1f} GiB"
    )
    return f"{sweep:>8} {size:>6}: {numbers} ({result.seconds:.1f} s)"


def charts(chosen: dict[str, dict[int, Point]], results: dict[Point, Result]) -> list[Chart]:
    drawn = []
    for sweep, points in chosen.items():
        for title, key in (("tokens/s", "tokens_per_second"), ("GiB, peak", "memory_gib")):
            found = [(float(size), getattr(results[point], key)) for size, point in points.items() if not results[point].error]
            drawn.append(Chart(f"{sweep}: {title}", sweep, title, {sweep: found}, log_x=True, marks=True, from_zero=True))
    return drawn


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(sweeps(1, 1))
    parser.add_argument("--points", default=",".join(names), help="which sweeps, in this order")
    parser.add_argument("--layers", type=int, default=2, help="of the base")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--seconds", type=float, default=120, help="start no point later than this")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="the model of train_configs/debug.toml at 32 tokens instead of 4096")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/cost", help="folder for results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    options.points = options.points.split(",")
    options.config = "train_configs/debug.toml" if options.tiny else "train_configs/qwen3_30b_a3b_12l.toml"
    if unknown := set(options.points) - set(names):
        parser.error(f"--points: unknown {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    return options


def main(argv: list[str]) -> None:
    begin, options = time.perf_counter(), parse_options(argv)
    os.chdir(ROOT)  # the configurations' paths start there
    options.out.mkdir(parents=True, exist_ok=True)
    everything = sweeps(32 if options.tiny else 4096, options.layers)
    chosen = {sweep: everything[sweep] for sweep in options.points}
    base = configure(next(iter(next(iter(chosen.values())).values())), options)
    device = start_processes(base)
    mesh = FoldedMesh(layout_of(base), device.type)
    report = environment.report(["python", "benchmarks/cost.py", *argv], options.commit)
    print(f"{environment.heading(report)}\n", flush=True)
    results: dict[Point, Result] = {}
    for sweep, points in chosen.items():
        for size, point in points.items():
            if point not in results:
                late = time.perf_counter() - begin > options.seconds
                results[point] = Result(error="no time left") if late else measure(point, options, mesh, device)
                free_memory()
            print(line(sweep, size, results[point]), flush=True)
        report[sweep] = [asdict(point) | asdict(results[point]) for point in points.values()]
        (options.out / "cost.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "cost.svg").write_text(svg(charts(chosen, results)))
    print(f"{time.perf_counter() - begin:.0f} s in all; {options.out}/cost.json, cost.svg")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
