"""Loss curves in high and low precision: the same weights to begin with, the same text, the same steps.

python benchmarks/loss_curve.py [--runs bf16,rowwise,...] [--seeds 0,1] [--steps 500] [--baseline bf16] [--compile] [--emulate]

Trains a Qwen3-style MoE of 208M parameters (8 layers, 32 experts of which 4 are chosen) on the Python standard library's source
text, 16 x 512 bytes a step, on one GPU: `fp32` without TF32, `bf16` as usual (fp32 weights, moments and reductions), and the
recipes of low precision for experts and linear layers, the latter rowwise in `blockwise`. `mxfp8` and `nvfp4` are emulated, the
others if asked to. A seed is one of initial weights: what a format changes is to be compared with what other weights change.

Each run of a seed writes OUT/runs/RUN-SEED.json when it is done, and is not repeated while that file is there, made with the same
settings. The curves of all such files, from wherever they were copied to OUT/runs, make the table, OUT/loss_curve.json and
OUT/loss_curve.svg.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist

from benchmarks import environment
from benchmarks.moe_layer import aligned
from benchmarks.svg_plot import Chart, Points, svg
from moe_titan.config import Config, ConfigError, build_model_args, load_config
from moe_titan.data import MicroBatch, build_dataloader, build_source, build_tokenizer
from moe_titan.flops import num_parameters
from moe_titan.lr_schedule import lr_factor
from moe_titan.trainer import build_engine, layout_of, start_processes
from parallelisms.folded_mesh import FoldedMesh

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {  # of linear layers and of experts
    "rowwise": ("rowwise", "rowwise"),
    "blockwise": ("rowwise", "blockwise"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
RUNS = ("fp32", "bf16", *RECIPES)
WITHOUT_KERNELS = ("mxfp8", "nvfp4")  # on Hopper
ALONE = {"parallelism.tensor_parallel_degree": 1, "parallelism.data_parallel_shard_degree": 1}
ALONE |= {"parallelism.expert_parallel_degree": 1, "checkpoint.enable": "false"}
SIZES = {
    **{"dim": 512, "head_dim": 64, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "moe_inter_dim": 512},
    **{"moe_args.num_experts": 32, "moe_args.top_k": 4},
}
TINY = {
    **{"dim": 96, "head_dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "moe_inter_dim": 96},
    **{"moe_args.num_experts": 4, "moe_args.top_k": 2},
}

Curves = dict[str, dict[int, list[float]]]  # losses by run and seed


def configure(run: str, seed: int, options: argparse.Namespace) -> Config:
    """train_configs/debug.toml at this script's size."""
    batch, seq_len = (2, 64) if options.tiny else (16, 512)
    flags = ALONE | {f"model.overrides.{name}": size for name, size in (TINY if options.tiny else SIZES).items()}
    flags |= {"training.local_batch_size": batch, "training.global_batch_size": batch, "training.seq_len": seq_len}
    flags |= {"training.steps": options.steps, "optimizer.lr": 1e-3, "debug.seed": seed}
    flags |= {"training.mixed_precision_param": "float32" if run == "fp32" else "bfloat16"}
    if run in RECIPES:
        flags |= dict(zip(("float8.recipe", "float8.expert_recipe"), RECIPES[run], strict=True))
        flags["float8.emulate"] = str(options.emulate or run in WITHOUT_KERNELS).lower()
    compiled = options.compile and run != "fp32"
    flags |= {"config": "train_configs/debug.toml", "compile.enable": str(compiled).lower()}
    return load_config([word for key, value in flags.items() for word in (f"--{key}", str(value))], 1)


def read_text(config: Config) -> list[list[MicroBatch]]:
    """The batches of all steps, the same for every run."""
    loader = build_dataloader(config, build_source(config.training), build_tokenizer(config), 0, 1)
    batches = [loader.next_step() for _ in range(config.training.steps)]
    loader.close()
    return batches


def train(config: Config, batches: list[list[MicroBatch]], mesh: FoldedMesh, device: torch.device) -> list[float]:
    """The loss of every step."""
    engine = build_engine(config, build_model_args(config), mesh, device, build_tokenizer(config).eos_id)
    schedule, results = config.lr_scheduler, []
    for step, batch in enumerate(batches):
        factor = lr_factor(
            step,
            total_steps=config.training.steps,
            warmup_steps=schedule.warmup_steps,
            decay_ratio=schedule.decay_ratio,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        )
        results.append(engine.step(batch, config.optimizer.lr * factor))
        if step:
            results[-2].wait()  # a step ahead of the device, as in the trainer
    losses = [result.loss for result in results]
    print(f"{num_parameters(engine.model) / 1e6:.0f}M parameters, loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return losses


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the curves of a comparison have in common."""
    return {key: getattr(options, key) for key in ("steps", "compile", "emulate", "tiny")}


def finished(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What runs with these settings left, in the order of the known runs."""
    found = [json.loads(path.read_text()) for path in (options.out / "runs").glob("*.json")]
    mine = [piece for piece in found if piece["settings"] == settings(options)]
    return sorted(mine, key=lambda piece: (RUNS.index(piece["run"]), piece["seed"]))


def curves_of(pieces: list[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for piece in pieces:
        curves.setdefault(piece["run"], {})[piece["seed"]] = piece["losses"]
    return curves


def smoothed(losses: list[float], window: int) -> list[float]:
    """Means over every ``window`` consecutive steps, one per step from the ``window``-th on."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(end - begin) / window for begin, end in zip(sums, sums[window:], strict=False)]


def gaps(losses: list[float], others: list[float], window: int) -> list[float]:
    return [a - b for a, b in zip(smoothed(losses, window), smoothed(others, window), strict=True)]


def summary(curves: Curves, baseline: str, window: int) -> dict[str, dict[str, Any]]:
    """By run: the final loss of each seed; its difference to the baseline of that seed, at the end and the largest; and how far
    apart seeds are at the end. All of losses smoothed over a window of steps."""
    found: dict[str, dict[str, Any]] = {}
    for run, seeds in curves.items():
        final = {seed: smoothed(losses, window)[-1] for seed, losses in seeds.items()}
        entry: dict[str, Any] = {"final": final, "seed_spread": max(final.values()) - min(final.values())}
        shared = [seed for seed in seeds if run != baseline and seed in curves.get(baseline, {})]
        by_seed = {seed: gaps(seeds[seed], curves[baseline][seed], window) for seed in shared}
        if by_seed:
            entry["difference"] = {seed: gap[-1] for seed, gap in by_seed.items()}
            entry["mean_difference"] = statistics.mean(gap[-1] for gap in by_seed.values())
            entry["largest_difference"] = max(abs(value) for gap in by_seed.values() for value in gap)
        found[run] = entry
    return found


def table(found: dict[str, dict[str, Any]], baseline: str) -> str:
    """A row per run."""
    rows = [["run", "final loss by seed", f"difference to {baseline} by seed", "mean", "largest on the way", "seed spread"]]
    for run, entry in found.items():
        row = [run, " ".join(f"{loss:.4f}" for loss in entry["final"].values())]
        if "difference" in entry:
            row.append(" ".join(f"{value:+.4f}" for value in entry["difference"].values()))
            row += [f"{entry['mean_difference']:+.4f}", f"{entry['largest_difference']:.4f}"]
        else:
            row += ["-"] * 3
        rows.append([*row, f"{entry['seed_spread']:.4f}"])
    return aligned(rows, 1)


def charts(curves: Curves, baseline: str, window: int) -> list[Chart]:
    def points(values: list[float]) -> Points:
        return [(float(step), value) for step, value in enumerate(values, start=window)]

    lines, differences = {}, {}
    for run, seeds in curves.items():
        lines[run] = points(smoothed(next(iter(seeds.values())), window))
        for seed, losses in seeds.items():
            if run != baseline and seed in curves.get(baseline, {}):
                differences[f"{run}, seed {seed}"] = points(gaps(losses, curves[baseline][seed], window))
    for a, b in combinations(curves.get(baseline, {}), 2):
        differences[f"{baseline}, seed {a} to {b}"] = points(gaps(curves[baseline][a], curves[baseline][b], window))
    over = f"smoothed over {window} steps"
    return [
        Chart(f"loss of the first seed, {over}", "step", "loss", lines),
        Chart(f"difference to {baseline}, {over}", "step", "loss", differences),
    ]


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="bf16,rowwise,blockwise,mxfp8,nvfp4", help=f"drawn from {', '.join(RUNS)}")
    parser.add_argument("--seeds", default="0,1", help="numbers of initial weights, by commas")
    parser.add_argument("--baseline", choices=RUNS, default="bf16", help="the run that others are compared with")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--window", type=int, default=25, help="steps that a smoothed loss is the mean of")
    parser.add_argument("--compile", action="store_true", help="compile all but fp32")
    parser.add_argument("--emulate", action="store_true", help="emulate all low precision")
    parser.add_argument("--tiny", action="store_true", help="a small model and batch, for a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/loss_curve", help="folder for results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    options.runs, options.out = options.runs.split(","), options.out.absolute()
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(options.runs) - set(RUNS):
        parser.error(f"--runs: unknown {', '.join(unknown)}; choose from {', '.join(RUNS)}")
    if options.steps < 20:
        parser.error(f"--steps: {options.steps} must be at least 20: 10 steps warm up, and half of all decay")
    if not 1 <= options.window <= options.steps:
        parser.error(f"--window: {options.window} must be from 1 to --steps, {options.steps}")
    return options


def train_missing(configs: dict[tuple[str, int], Config], report: dict[str, Any], options: argparse.Namespace) -> None:
    """Trains, and writes what each left."""
    first = next(iter(configs.values()))
    device = start_processes(first)
    mesh, batches = FoldedMesh(layout_of(first), device.type), None
    for (run, seed), config in configs.items():
        begin = time.perf_counter()
        batches = batches or read_text(configure(run, 0, options))
        print(f"{run}, seed {seed}: ", end="", flush=True)
        losses = train(config, batches, mesh, device)
        gc.collect()
        seconds = time.perf_counter() - begin
        piece = {"run": run, "seed": seed, "settings": settings(options), "seconds": seconds, "losses": losses}
        (options.out / "runs" / f"{run}-{seed}.json").write_text(json.dumps(report | piece) + "\n")
        print(f"{run}, seed {seed}: {seconds:.1f} s", flush=True)
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    os.chdir(ROOT)  # the configuration's path starts there
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")  # no TF32
    done = {(piece["run"], piece["seed"]) for piece in finished(options)}
    missing = [(run, seed) for run in options.runs for seed in options.seeds if (run, seed) not in done]
    try:
        configs = {(run, seed): configure(run, seed, options) for run, seed in missing}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    report = environment.report(["python", "benchmarks/loss_curve.py", *argv], options.commit)
    print(f"{environment.heading(report)}\n", flush=True)
    if configs:
        train_missing(configs, report, options)
    pieces = finished(options)
    curves = curves_of(pieces)
    found = summary(curves, options.baseline, options.window)
    report |= {"window": options.window, "baseline": options.baseline, "summary": found, "runs": pieces}
    (options.out / "loss_curve.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "loss_curve.svg").write_text(svg(charts(curves, options.baseline, options.window)))
    print(
        f"\n{table(found, options.baseline)}\nof losses smoothed over {options.window} steps; {options.out}/loss_curve.svg, .json"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
