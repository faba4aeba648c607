"""The loss of a bf16 run beside that of the same run in fp32: the same weights to begin with, the same text, 200 steps each.

python benchmarks/loss_curve.py [--steps 200] [--window 10] [--compile]

Trains a Qwen3-style MoE of 208M parameters (8 layers, 32 experts of which 4 are chosen) on the Python standard library's source
text, 16 x 512 bytes a step, one run after the other in one process on one GPU: all in fp32 without TF32, in bf16 as usual (fp32
weights, moments and reductions), and in bf16 once more from other initial weights. What bf16 changes is to be compared with what
other weights change, both as differences of losses smoothed over a window of steps. Writes OUT/loss_curve.json and
OUT/loss_curve.svg.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist

from benchmarks import environment
from benchmarks.svg_plot import Chart, svg
from moe_titan.config import Config, build_model_args, load_config
from moe_titan.data import MicroBatch, build_dataloader, build_source, build_tokenizer
from moe_titan.flops import num_parameters
from moe_titan.lr_schedule import lr_factor
from moe_titan.trainer import build_engine, layout_of, start_processes
from parallelisms.folded_mesh import FoldedMesh

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"fp32": ("float32", 0), "bf16": ("bfloat16", 0), "bf16, other weights": ("bfloat16", 1)}
PAIRS = {"bf16 to fp32": ("bf16", "fp32"), "other weights": ("bf16, other weights", "bf16")}
ALONE = {"parallelism.tensor_parallel_degree": 1, "parallelism.data_parallel_shard_degree": 1}
ALONE |= {"parallelism.expert_parallel_degree": 1, "checkpoint.enable": "false"}
SIZES = {
    **{"dim": 512, "head_dim": 64, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "moe_inter_dim": 512},
    **{"moe_args.num_experts": 32, "moe_args.top_k": 4},
}
TINY = {
    **{"dim": 32, "head_dim": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "moe_inter_dim": 16},
    **{"moe_args.num_experts": 4, "moe_args.top_k": 2},
}


def configure(run: str, options: argparse.Namespace) -> Config:
    """train_configs/debug.toml at this script's size."""
    dtype, seed = RUNS[run]
    batch, seq_len = (2, 64) if options.tiny else (16, 512)
    flags = ALONE | {f"model.overrides.{name}": size for name, size in (TINY if options.tiny else SIZES).items()}
    flags |= {"training.local_batch_size": batch, "training.global_batch_size": batch, "training.seq_len": seq_len}
    flags |= {"training.steps": options.steps, "optimizer.lr": 1e-3, "debug.seed": seed, "training.mixed_precision_param": dtype}
    compiled = options.compile and dtype == "bfloat16"
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


def smoothed(losses: list[float], window: int) -> list[float]:
    """Means over every ``window`` consecutive steps, one per step from the ``window``-th on."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(end - begin) / window for begin, end in zip(sums, sums[window:], strict=False)]


def differences(curves: dict[str, list[float]], window: int) -> dict[str, dict[str, float]]:
    """By pair of runs, the largest and mean absolute difference of their smoothed losses, and the step of the largest."""
    found = {}
    for name, (run, other) in PAIRS.items():
        gaps = [abs(a - b) for a, b in zip(smoothed(curves[run], window), smoothed(curves[other], window), strict=True)]
        largest = max(gaps)
        found[name] = {"largest": largest, "at_step": gaps.index(largest) + window, "mean": sum(gaps) / len(gaps)}
    return found


def charts(curves: dict[str, list[float]], window: int) -> list[Chart]:
    smooth = {run: smoothed(losses, window) for run, losses in curves.items()}

    def points(values: list[float]) -> list[tuple[float, float]]:
        return [(float(step), value) for step, value in enumerate(values, start=window)]

    gaps = {
        name: points([a - b for a, b in zip(smooth[run], smooth[other], strict=True)]) for name, (run, other) in PAIRS.items()
    }
    lines = {run: points(values) for run, values in smooth.items()}
    over = f"smoothed over {window} steps"
    return [Chart(f"loss, {over}", "step", "loss", lines), Chart(f"differences, {over}", "step", "loss", gaps)]


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=10, help="steps that a smoothed loss is the mean of")
    parser.add_argument("--compile", action="store_true", help="compile the bf16 runs")
    parser.add_argument("--tiny", action="store_true", help="a small model and batch, for a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/loss_curve", help="folder for results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv)
    if options.steps < 20:
        parser.error(f"--steps: {options.steps} must be at least 20: 10 steps warm up, and half of all decay")
    if not 1 <= options.window <= options.steps:
        parser.error(f"--window: {options.window} must be from 1 to --steps, {options.steps}")
    return options


def main(argv: list[str]) -> None:
    options = parse_options(argv)
    os.chdir(ROOT)  # the configuration's path starts there
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")  # no TF32
    configs = {run: configure(run, options) for run in RUNS}
    device = start_processes(configs["fp32"])
    mesh = FoldedMesh(layout_of(configs["fp32"]), device.type)
    batches = read_text(configs["fp32"])
    report = environment.report(["python", "benchmarks/loss_curve.py", *argv], options.commit)
    print(f"{environment.heading(report)}\n", flush=True)
    curves = {}
    for run, config in configs.items():
        begin = time.perf_counter()
        print(f"{run}: ", end="", flush=True)
        curves[run] = train(config, batches, mesh, device)
        gc.collect()
        print(f"{run}: {time.perf_counter() - begin:.1f} s", flush=True)
    found = differences(curves, options.window)
    report |= {"window": options.window, "differences": found, "losses": curves}
    (options.out / "loss_curve.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "loss_curve.svg").write_text(svg(charts(curves, options.window)))
    for name, gap in found.items():
        print(f"{name:>13}: largest difference {gap['largest']:.4f} (step {gap['at_step']}), mean {gap['mean']:.5f}")
    print(f"of losses smoothed over {options.window} steps; {options.out}/loss_curve.json, loss_curve.svg")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
