"""Memory of a rank for the files in train_configs/, from their sharding plans; starts nothing and needs no GPU.

python benchmarks/memory_estimate.py [FILE.toml ...]

The world is the one that a file's own command line starts; its ranks are imagined (torch's fake process group) and the model lies
on the meta device. Bytes per parameter held by the rank, with fp32 weights and moments and a micro-batch a step:

    14  outside of FSDP2: weight 4, moments 8, bf16 gradient 2
    16  of routers, and under FSDP2 of this rank's shard: weight 4, moments 8, fp32 gradient 4
    10  under FSDP2, of the largest unit: gathered bf16 weights of it and of the next 4, bf16 gradient 2, its fp32 copy 4

Activations are estimated by formula (see `kept` and `at_work`). Gradients come as activations go, so the sum is more than the
peak; NCCL, the CUDA context and gaps in the allocator's memory come on top.
"""

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_titan.config import Config, build_model_args, load_config
from moe_titan.flops import num_parameters
from moe_titan.models import build_model
from moe_titan.trainer import layout_of
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.folded_mesh import FoldedMesh
from parallelisms.parallelize import ParallelOptions, parallelize
from parallelisms.sharding_plan import ShardingPlan, local

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = str(ROOT / "tests/assets/torchtitan/tokenizer")  # a model's own is not in the repository
GIB = 2**30


@dataclass
class Estimate:
    """``parameters`` of the whole model; bytes of rank 0."""

    world: int
    parameters: int
    states: int
    gathered: int
    kept: int
    at_work: int

    @property
    def total(self) -> int:
        return self.states + self.gathered + self.kept + self.at_work

    def cells(self) -> str:
        """A row of the table, without its name: GPUs, parameters in 1e9, and GiB."""
        sizes = (self.states, self.gathered, self.kept, self.at_work, self.total)
        return " | ".join([str(self.world), f"{self.parameters / 1e9:.2f}", *(f"{size / GIB:.1f}" for size in sizes)])


def world_size(file: Path) -> int:
    """Processes that the command line in a file's head starts.

    Raises:
        ValueError: there is none that names the file.
    """
    command = re.search(rf"^# (.*)train\.py --config train_configs/{file.name}$", file.read_text(), re.MULTILINE)
    if command is None:
        raise ValueError(f"{file}: no line '# ... train.py --config train_configs/{file.name}' says how it is started")
    nodes, processes = (re.search(rf"--{flag}=(\d+)", command[1]) for flag in ("nnodes", "nproc-per-node"))
    return (int(nodes[1]) if nodes else 1) * (int(processes[1]) if processes else 1)


def estimate(config: Config, world: int) -> Estimate:
    """What rank 0 of a run needs. There must be no process group."""
    args = build_model_args(config)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parameters = num_parameters(build_model(config.model.name, args))
        states, gathered = states_of(*laid_out(config, args))
    finally:
        dist.destroy_process_group()
    return Estimate(world, parameters, states, gathered, kept(config, args), at_work(config, args))


def laid_out(config: Config, args: Any) -> tuple[nn.Module, ShardingPlan]:
    """Rank 0's part of the model, on the meta device."""
    model, mesh = build_model(config.model.name, args), FoldedMesh(layout_of(config), "cpu")
    spread = mesh.expert_model is not None
    options = ParallelOptions("alltoall" if spread else "local", recompute=config.activation_checkpoint.mode)
    return model, parallelize(model, mesh, options, RowCapacity(None, torch.device("cpu")))


def parameters_of(config: Config, args: Any) -> tuple[int, int, int, int]:
    """Parameters that rank 0 holds split, whole, and as shards under FSDP2, and the ranks that share these."""
    model, plan = laid_out(config, args)
    held = [(plan[name], local(parameter).numel()) for name, parameter in model.named_parameters()]
    ranks = max((row.data_mesh.shape[-1] for row, _ in held if row.fsdp), default=1)
    sharded, split = (sum(n for row, n in held if is_so(row)) for is_so in (attrgetter("fsdp"), attrgetter("split")))
    return split, sum(n for _, n in held) - split - sharded, sharded, ranks


def states_of(model: nn.Module, plan: ShardingPlan) -> tuple[int, int]:
    """Bytes of weights, moments and gradients, and of the largest FSDP2 unit while it is whole."""
    states, units = 0, Counter[str]()
    for name, parameter in model.named_parameters():
        row, held = plan[name], local(parameter).numel()
        states += held * (14 if row.split else 16)
        if row.fsdp:
            units[_unit(name)] += held * row.data_mesh.shape[-1]
    return states, 10 * max(units.values(), default=0)


def _unit(name: str) -> str:
    """What FSDP2 gathers together, as :func:`parallelisms.fsdp.apply_fsdp` wraps it."""
    experts, found, _ = name.partition(".experts.")
    return experts if found else ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]


def kept(config: Config, args: Any) -> int:
    """Bytes that the layers keep from forward to backward; a dense layer is taken for as wide as an MoE layer is to a token."""
    T, N, R, F = sizes_of(config, args)
    if config.moe.stash_factor is not None and N:
        R = config.moe.stash_factor * N * args.moe_args.top_k / config.parallelism.expert_parallel_degree
    D, shared = args.dim, args.moe_args.num_shared_experts * args.moe_inter_dim
    query_key, value = head_dims(args)
    # In FP8 a number takes one byte of two.
    numbers = R * F if config.float8.save_activations else 2 * R * F
    per_layer = {
        # The layer's input.
        "full": T * D,
        # Besides: input of the second norm, both inputs normalised, attention's output, every other product of the shared
        # experts, the tokens that came from all ranks.
        "selective": T * (4 * D + args.n_heads * value + (shared + D if shared else 0)) + N * D,
        # Besides: queries, keys and values, before and after rotation; all of the shared and routed experts' pre-activations.
        "none": T * (6 * D + args.n_heads * 2 * (query_key + value) + 3 * shared) + N * D + numbers,
    }
    return int(2 * args.n_layers * per_layer[config.activation_checkpoint.mode])


def at_work(config: Config, args: Any) -> int:
    """Bytes of one layer's routed experts in backward: rows, their gradients, those of the outputs, pre-activations and their
    gradients; and what nvlink's ranks share."""
    _, N, R, F = sizes_of(config, args)
    return 2 * R * (3 * args.dim + 4 * F) + 2 * N * args.dim


def sizes_of(config: Config, args: Any) -> tuple[int, int, int, int]:
    """Tokens T of a rank, N that it has room for from its expert group, rows R that nvlink has room for, width F of an expert."""
    degrees, moe = config.parallelism, args.moe_args
    tokens = config.training.local_batch_size * config.training.seq_len // degrees.tensor_parallel_degree
    ep, etp = degrees.expert_parallel_degree, degrees.expert_tensor_parallel_degree
    ranks = ep * etp
    rows = tokens * ranks * min(moe.top_k, moe.num_experts // ep)
    return tokens, tokens * ranks if ranks > 1 else 0, rows, args.moe_inter_dim // etp


def head_dims(args: Any) -> tuple[int, int]:
    """Widths of a head's queries (and keys) and of its values."""
    if hasattr(args, "kv_lora_rank"):
        return args.qk_nope_head_dim + args.qk_rope_head_dim, args.v_head_dim
    return args.head_dim, args.head_dim


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted((ROOT / "train_configs").glob("*.toml")))
    print("| file | GPUs | parameters, 1e9 | states | gathered | kept | at work | total, GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for file in parser.parse_args(argv).files:
        world = world_size(file)
        found = estimate(load_config(["--config", str(file), "--model.hf_assets_path", TOKENIZER], world), world)
        print(f"| `{file.stem}` | {found.cells()} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
