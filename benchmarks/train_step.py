"""Training steps of moe_titan beside stock torchtitan 0.2.2: same machine, shape, text and settings.

python benchmarks/train_step.py --shape A|B [--gpus 2] [--layers N] [--batch 4] [--routing forced] [--runs ours,torchtitan,...]
    [-- --section.key value ...]

Shape A is train_configs/qwen3_30b_a3b_12l.toml, shape B train_configs/deepseek_v3_16b_12l.toml, of 12 layers each; on one
GPU both have 4 unless `--layers` says otherwise. A run is `ours` or `torchtitan`, with the experts spread over all GPUs and
attention data parallel over them; suffixes say otherwise, as in `ours-tp2-ep4-etp2`: `-epN` experts over groups of N, `-etpN`
each expert over N, `-tpN` attention tensor parallel over N at the same global batch, `-dprN` N replicas (HSDP), and for ours
`-rowwise` or `-blockwise` FP8, which is the experts' recipe; linear layers are rowwise in both. Routing is natural or forced:
every expert gets as many tokens. What follows `--` goes to our runs alone. Results are printed and written to
OUT/train_step.json.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

from benchmarks import environment, product_share
from benchmarks.torchtitan_run import parse_log, torchtitan_toml, write_corpus
from benchmarks.trace_summary import summarize
from moe_titan.config import Config, ConfigError, build_model_args, load_config
from moe_titan.flops import peak_flops, train_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"A": "train_configs/qwen3_30b_a3b_12l.toml", "B": "train_configs/deepseek_v3_16b_12l.toml"}
DEGREES = r"(-tp(?P<tp>\d+))?(-dpr(?P<dpr>\d+))?(-ep(?P<ep>\d+))?(-etp(?P<etp>\d+))?"
RUN = re.compile(rf"(?!torchtitan.*wise)(?P<engine>ours|torchtitan){DEGREES}(-(?P<float8>rowwise|blockwise))?")
WARMUP_STEPS = 10
LOG_FREQ = 5  # a logged throughput is the mean over so many steps
PROFILER = {"profiler_warmup": LOG_FREQ - 2, "profiler_active": 2}  # the last window, which is then not timed
LOSS_STEPS = (1, 10, 25, 50)

Steps = list[dict[str, float]]  # logged steps: step, loss, tokens_per_second (per GPU), ...


@dataclass
class Result:
    """What one run gave; without numbers where it failed."""

    run: str
    command: str
    seconds: float
    error: str | None = None
    tokens_per_second: float | None = None  # per GPU, median over the timed windows of steps
    tflops: float | None = None  # per GPU, by our count of model FLOPs for every run
    mfu: float | None = None
    of_dense: float | None = None  # TFLOP/s over those of one large product on this machine
    idle: float | None = None  # share of the profiled steps in which the GPU does nothing
    low_precision: float | None = None  # share of the FLOPs of matrix products in the profiled steps
    memory_allocated_gib: float | None = None  # rank 0's peak of torch.cuda.max_memory_allocated
    memory_reserved_gib: float | None = None  # torchtitan's own figure: what torch's allocator held at most
    steps: Steps = field(default_factory=list)


def our_flags(run: str, options: argparse.Namespace) -> list[str]:
    """The command line of one of our runs; a torchtitan run gets the same settings from the same flags."""
    parts = RUN.fullmatch(run)
    assert parts is not None
    degrees = {name: int(value) for name, value in parts.groupdict().items() if value and value.isdecimal()}
    flags = {
        "config": SHAPES[options.shape],
        "job.dump_folder": options.out / run,
        "training.steps": options.steps,
        "metrics.log_freq": LOG_FREQ,
        "parallelism.expert_parallel_degree": degrees.get("ep", options.gpus // degrees.get("etp", 1)),
        "debug.moe_force_load_balance": str(options.routing == "forced").lower(),
    }
    tp = degrees.get("tp", 1)
    flags |= {"parallelism.tensor_parallel_degree": tp, "training.local_batch_size": options.batch * tp}
    if etp := degrees.get("etp"):
        flags["parallelism.expert_tensor_parallel_degree"] = etp
    if dpr := degrees.get("dpr"):
        flags["parallelism.data_parallel_replicate_degree"] = dpr
    if parts["float8"]:
        flags |= {"float8.recipe": "rowwise", "float8.expert_recipe": parts["float8"]}
    if options.layers:
        flags["model.overrides.n_layers"] = options.layers
    if options.profile:
        flags |= {"profiling.enable_profiling": "true", "profiling.profile_freq": options.steps}
        flags |= {f"profiling.{key}": steps for key, steps in PROFILER.items()}
    spelled = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return spelled + (options.flags if parts["engine"] == "ours" else [])


def train(run: str, flags: list[str], config: Config, options: argparse.Namespace) -> Result:
    """One run in processes of its own, and what it left."""
    folder = options.out / run
    folder.mkdir(parents=True, exist_ok=True)
    ours = run.startswith("ours")
    if ours:
        program = ["train.py", *flags]
    else:
        corpus, settings = options.out / "corpus", folder / "torchtitan.toml"
        write_corpus(corpus, config.debug.seed)
        settings.write_text(torchtitan_toml(config, corpus))
        program = ["benchmarks/peer_torchtitan.py", "--job.config_file", str(settings)]
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={options.gpus} --role rank --tee 3".split()
    command = [sys.executable, *launcher, *program]
    begin = time.monotonic()
    error = launch(command, folder / "log.txt", options.timeout)
    result = Result(run, shlex.join(command), time.monotonic() - begin, error)
    if error is None:
        steps, allocated = our_steps(folder) if ours else parse_log((folder / "log.txt").read_text())
        result.steps, result.memory_allocated_gib = steps, allocated
        if not ours:
            result.memory_reserved_gib = steps[-1]["memory_reserved_gib"]
        add_throughput(result, config, options)
    return result


def launch(command: list[str], log: Path, timeout: float) -> str | None:
    """Run a command from the checkout with its output in `log`. Returns what went wrong, if anything did."""
    variables = {
        # As torchtitan's own start script sets it, for both.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(log.parents[1] / "huggingface"),
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | variables)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers, which are in sessions of their own
            process.wait()
            return f"not done after {timeout:.0f} s; {log} ends with\n{tail(log)}"
    return f"exit code {status}; {log} ends with\n{tail(log)}" if status else None


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def our_steps(folder: Path) -> tuple[Steps, float]:
    """The steps of metrics.jsonl, and the peak of allocated memory in GiB."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "tokens_per_second", "step_ms", "data_ms")
    return [{key: float(record[key]) for key in keys} for record in records], records[-1]["memory_gib"]


def add_throughput(result: Result, config: Config, options: argparse.Namespace) -> None:
    last = options.steps - (LOG_FREQ if options.profile else 0)
    result.tokens_per_second = statistics.median(
        step["tokens_per_second"] for step in result.steps if WARMUP_STEPS < step["step"] <= last
    )
    per_token = train_flops_per_token(build_model_args(config), config.training.seq_len, config.mtp.num_layers)
    flops = result.tokens_per_second * per_token
    result.tflops = flops / 1e12
    peak = peak_flops(environment.hardware()[0])
    result.mfu = flops / peak if peak else None
    result.of_dense = flops / options.dense_rate if options.dense_rate else None
    if options.profile and (traces := traces_of(options.out / result.run)):
        result.idle = summarize(traces[-1]).idle
        if result.run.startswith("ours"):
            result.low_precision = product_share.low_precision_share(traces[-1], expert_rows(config))


def expert_rows(config: Config) -> float:
    """That a rank has of a micro-batch on average; buffers may have room for more."""
    layout = config.parallelism
    tokens = config.training.local_batch_size * config.training.seq_len / layout.tensor_parallel_degree
    return tokens * build_model_args(config).moe_args.top_k * layout.expert_tensor_parallel_degree


def table(results: list[Result]) -> str:
    """The results as text, a row per run."""
    peer = next((result.tokens_per_second for result in results if result.run == "torchtitan"), None)
    head = ["run", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "of dense", "idle", "FP8", "memory GiB", "x torchtitan"]
    rows = [head + [f"loss@{step}" for step in LOSS_STEPS]]
    for result in results:
        speed = result.tokens_per_second
        losses = {step["step"]: step["loss"] for step in result.steps}
        rows.append(
            [
                result.run,
                shown(speed, ",.0f"),
                shown(result.tflops, ".1f"),
                shown(result.mfu, ".1%"),
                shown(result.of_dense, ".1%"),
                shown(result.idle, ".1%"),
                shown(result.low_precision, ".1%"),
                shown(result.memory_allocated_gib, ".1f"),
                shown(speed / peer if speed and peer else None, ".3f"),
                *(shown(losses.get(step), ".4f") for step in LOSS_STEPS),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def loss_differences(results: list[Result]) -> dict[str, float]:
    """By other layout of ours, the largest relative difference of a logged loss to that of the first layout."""
    ours = [result for result in results if result.run.startswith("ours") and result.steps]
    return {
        f"{other.run} to {ours[0].run}": max(
            abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(other.steps, ours[0].steps, strict=True)
        )
        for other in ours[1:]
    }


def traces_of(folder: Path) -> list[Path]:
    """Rank 0's traces, the newest last."""
    return sorted(folder.rglob("*rank0*.json*"), key=lambda path: path.stat().st_mtime)


def dense_rate() -> float | None:
    """FLOP/s of one large bf16 product on the first GPU, measured in a process of its own; None without a GPU."""
    found = subprocess.run([sys.executable, "benchmarks/dense_rate.py"], capture_output=True, text=True, cwd=ROOT)
    return float(found.stdout) if found.returncode == 0 and found.stdout.strip() else None


def trace_report(folder: Path, config: Config) -> str:
    """Kernel times of the newest trace of rank 0 in a run's folder."""
    traces = traces_of(folder)
    if not traces:
        return f"{folder.name}: no trace"
    try:
        products = product_share.report(traces[-1], expert_rows(config)) if folder.name.startswith("ours") else ""
        return f"{folder.name}: {traces[-1]}\n{summarize(traces[-1])}\n{products}".rstrip()
    except ValueError as error:  # a run without GPUs
        return str(error)


def parse_options(argv: list[str]) -> argparse.Namespace:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, help="instead of 12, and of 4 on one GPU")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 4096 tokens per GPU and step")
    parser.add_argument("--routing", choices=("natural", "forced"), default="natural")
    parser.add_argument("--runs", default="ours,torchtitan", help="by commas, one after the other; see above")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=270, help="seconds for a run")
    parser.add_argument("--profile", action="store_true", help="trace the last 2 steps and sum up their kernels")
    parser.add_argument("--out", type=Path, help="folder for logs and results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    options = parser.parse_args(argv[:split])
    options.flags, options.dense_rate = argv[split + 1 :], None
    options.layers = options.layers or (4 if options.gpus == 1 else None)
    options.runs = options.runs.split(",")
    options.out = (options.out or ROOT / f"outputs/benchmarks/train_step_{options.shape}").absolute()
    if unknown := [run for run in options.runs if not RUN.fullmatch(run)]:
        what = "ours or torchtitan, then -tpN, -dprN, -epN, -etpN as wanted, in this order, and for ours -rowwise or -blockwise"
        parser.error(f"--runs: unknown {', '.join(unknown)}; a run is {what}")
    if len(set(options.runs)) < len(options.runs):
        parser.error("--runs: name each run once")
    if options.steps < (least := WARMUP_STEPS + 2 * LOG_FREQ) or options.steps % LOG_FREQ:
        parser.error(f"--steps: {options.steps} must be a multiple of {LOG_FREQ} and at least {least}")
    return options


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    os.chdir(ROOT)  # the configurations' paths start there
    try:
        flags = {run: our_flags(run, options) for run in options.runs}
        configs = {run: load_config(flags[run], options.gpus) for run in options.runs}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    options.dense_rate = dense_rate()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/train_step.py", *argv]),
        "commit": options.commit,
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "shape": SHAPES[options.shape],
        "routing": options.routing,
        "dense_tflops": options.dense_rate and options.dense_rate / 1e12,
    }
    results = []
    for run, config in configs.items():
        print(f"{run}: running", flush=True)
        results.append(result := train(run, flags[run], config, options))
        outcome = f"failed: {result.error}" if result.error else f"{result.tokens_per_second:,.0f} tokens/s/GPU"
        print(f"{run}: {outcome} ({result.seconds:.0f} s)", flush=True)
        report["results"], report["loss_differences"] = [asdict(each) for each in results], loss_differences(results)
        (options.out / "train_step.json").write_text(json.dumps(report, indent=1) + "\n")
    if options.profile:
        for run, config in configs.items():
            print(f"\n{trace_report(options.out / run, config)}")
    print(f"\n{report['command']}\ncommit {options.commit}\n{', '.join(report['hardware'])}\n{report['versions']}\n")
    print(table(results))
    print(
        f"Throughput: median over windows of {LOG_FREQ} steps after step {WARMUP_STEPS}. Memory: peak allocated by torch "
        "on rank 0. TFLOP/s and MFU: model FLOPs, causal attention halved. Of dense: of the rate of one large product. FP8: "
        "share of the FLOPs of the matrix products that ran."
    )
    for pair, difference in report["loss_differences"].items():
        print(f"largest relative difference of a logged loss, {pair}: {difference:.2e}")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
