"""What bounds a training step: its parts at the rates that a machine reaches, from a configuration's sizes; needs no GPU.

python benchmarks/roofline.py [--gpus 2] [--dense 775] [--copy 4.3] [--link 390] [FILE.toml ...]

Products are at the rate of one large product, what goes through memory at that of a copy, what goes between GPUs at that of a
copy into the peer's memory; the defaults are an H200's, as measured by benchmarks/dense_rate.py and by copies of 1 GiB. Every
part counts what it must read and write once, loads are even, and nothing is recomputed. `work` is the sum of what one GPU does,
which is in each other's way even on several streams: a step is at least that long, and `work and link` where nothing overlaps.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory_estimate import ROOT, TOKENIZER, head_dims, parameters_of, sizes_of
from moe_titan.config import Config, build_model_args, load_config
from moe_titan.flops import train_flops_per_token

FILES = ["qwen3_30b_a3b_12l", "deepseek_v3_16b_12l"]
# Bytes per parameter of the optimizer's pass, reading and writing, with the gradient read once more for the norm: weight and its
# lower bits, two moments and a bf16 gradient; of routers and under FSDP2 fp32 weight, moments and gradient.
SPLIT, WHOLE = 28, 32


def parts(config: Config, world: int) -> dict[str, tuple[str, float]]:
    """Of each part of a rank's step with one micro-batch: "flops", "memory" or "link", and how many FLOPs or bytes."""
    args, degrees = build_model_args(config), config.parallelism
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        split, routers, sharded, ranks = parameters_of(config, args)
    finally:
        dist.destroy_process_group()
    T, N, _, F = sizes_of(config, args)
    D, V, layers, K = args.dim, args.vocab_size, args.n_layers, args.moe_args.top_k
    moe_layers = layers - getattr(args, "n_dense_layers", 0)
    R = T * K * degrees.expert_tensor_parallel_degree
    seq = config.training.seq_len
    scores = (train_flops_per_token(args, 2 * seq) - train_flops_per_token(args, seq)) * T
    query_key, value = head_dims(args)
    heads = args.n_heads * (2 * query_key + 2 * value)
    rows = {"forward": (N or T) * D + 3 * R * D + 3 * R * F + T * D, "backward": 2 * (N or T) * D + 6 * R * D + 6 * R * F + T * D}
    peers = (degrees.expert_parallel_degree - 1) / degrees.expert_parallel_degree
    return {
        "products": ("flops", train_flops_per_token(args, seq) * T - scores),
        "attention": ("flops", scores),
        "optimizer": ("memory", SPLIT * split + WHOLE * (routers + sharded)),
        "rows of experts": ("memory", 2 * moe_layers * sum(rows.values())),
        "norms, rotation, residuals": ("memory", 2 * 3 * layers * T * (7 * D + heads)),
        "logits": ("memory", 2 * 5 * T * V),
        "dispatch and combine": ("link", 4 * moe_layers * 2 * T * D * min(K * peers, degrees.expert_parallel_degree - 1)),
        # Weights gathered twice and gradients reduced; of routers fp32 gradients reduced and gathered.
        "FSDP2, routers": ("link", (2 + 2 + 4) * (sharded + routers / ranks) * (ranks - 1)),
    }


def table(config: Config, world: int, rates: dict[str, float]) -> list[str]:
    found = parts(config, world)
    times = {name: amount / rates[kind] * 1e3 for name, (kind, amount) in found.items()}
    lines = []
    for name, (kind, amount) in found.items():
        scaled = f"{amount / 1e12:8.2f} TFLOP" if kind == "flops" else f"{amount / 1e9:8.2f} GB   "
        lines.append(f"{name:28}{scaled} {times[name]:7.1f} ms")
    link = sum(time for name, time in times.items() if found[name][0] == "link")
    work = sum(times.values()) - link
    tokens = sizes_of(config, build_model_args(config))[0]
    for name, time in {"work": work, "work and link": work + link}.items():
        lines.append(f"{name:42} {time:7.1f} ms, {tokens / time * 1e3:,.0f} tokens/s per GPU at most")
    return lines


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "train_configs" / f"{name}.toml" for name in FILES])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--dense", type=float, default=775, help="TFLOP/s of a large bf16 product")
    parser.add_argument("--copy", type=float, default=4.3, help="TB/s of a copy in memory, read and written bytes together")
    parser.add_argument("--link", type=float, default=390, help="GB/s from one GPU to the others")
    options = parser.parse_args(argv)
    rates = {"flops": options.dense * 1e12, "memory": options.copy * 1e12, "link": options.link * 1e9}
    for file in options.files:
        flags = ["--config", str(file), "--model.hf_assets_path", TOKENIZER]
        flags += ["--parallelism.expert_parallel_degree", "1"] if options.gpus == 1 else []
        config: Any = load_config(flags, options.gpus)
        print(f"{file.stem}, {options.gpus} GPUs:", *table(config, options.gpus, rates), sep="\n  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
