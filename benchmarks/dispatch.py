"""Dispatch and combine alone, beside a plain copy between the same GPUs and beside NCCL.

torchrun --nproc-per-node 2 benchmarks/dispatch.py [--tokens 8192,32768] [--sms 16,32,64,132] [--fp8] [--out FOLDER]

bf16 tokens, fp32 weights, natural routing from random scores, all ranks of the run as one expert group. Payload is what leaves a
rank: each token once for every other rank with one of its experts. "transfers" are the kernels of kernels/dispatch.py in a CUDA
graph; "whole" is the dispatcher eagerly, with sorting and local sums. Times are medians in us of the slowest rank, rates payload
over time. The table comes last; everything is also written to OUT/dispatch.json.

With --fp8 also what FP8 dispatch brings: "alone" is the transfer of a dispatch, "to operand" all from bf16 tokens on this rank to
the FP8 rows that the experts multiply, in CUDA graphs for nvlink and eagerly for alltoall. These rows must be the same bits as
those of tokens that came in bf16, or the exit code is 1.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import environment, ranks
from benchmarks.ranks import eager, graphed
from float8.experts import Float8Products
from kernels.dispatch import push_rows, push_sums, push_tokens
from kernels.packed_tokens import Packing
from kernels.sort import sort_pairs
from parallelisms.dispatch import build_dispatcher
from parallelisms.routing import PairOrder, Routing

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
PASSES = ("dispatch", "combine", "combine backward", "dispatch backward")


@dataclass(frozen=True)
class Case:
    """T tokens a rank of width D, K of E experts each."""

    T: int
    D: int
    E: int
    K: int

    def routing(self) -> Routing:
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        scores_TE = torch.rand(self.T, self.E, device="cuda", generator=generator)
        weights_TK, experts_TK = scores_TE.topk(self.K, dim=1)
        order = PairOrder(*sort_pairs(experts_TK.flatten(), self.E))
        return Routing(experts_TK, weights_TK.requires_grad_(), order)

    def payload(self, experts_TK: Tensor) -> int:
        """Bytes of tokens that leave this rank in a dispatch; as many come back in a combine."""
        holder_TK = experts_TK // (self.E // dist.get_world_size())
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        return sum(int((holder_TK == rank).any(1).sum()) for rank in others) * self.D * 2


def peer_copy_rates(size: int = 256 * MIB) -> dict[str, float]:
    """GB/s of copies to and from the next rank's memory, all ranks at once."""
    import torch.distributed._symmetric_memory as symmetric_memory

    shared = symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
    handle = symmetric_memory.rendezvous(shared, dist.group.WORLD)
    peer = handle.get_buffer((dist.get_rank() + 1) % dist.get_world_size(), (size,), torch.uint8)
    own = torch.empty_like(shared)
    rates = {}
    for mib in (32, size // MIB):
        there, here = peer[: mib * MIB], own[: mib * MIB]
        rates[f"write {mib} MiB"] = mib * MIB / eager(partial(there.copy_, here)) / 1e3
        rates[f"read {mib} MiB"] = mib * MIB / eager(partial(here.copy_, there)) / 1e3
    return rates


@torch.no_grad()
def transfers(case: Case, sms: int) -> dict[str, float]:
    """us of the four transfers of a layer, forward and backward, in CUDA graphs."""
    world, routing = dist.get_world_size(), case.routing()
    dispatcher = build_dispatcher("nvlink", case.E, dist.group.WORLD, world, 1, case.T, sms)
    place = dispatcher.place
    experts_TK, weights_TK = routing.topk_experts_TK, routing.topk_weights_TK
    x_TD = torch.randn(case.T, case.D, device="cuda", dtype=torch.bfloat16)
    tokens_ND, weights_NK, key_NK, slot_N = push_tokens(x_TD, experts_TK, weights_TK, *place)
    row_NK = sort_pairs(key_NK.flatten(), place.num_local)[1].view_as(key_NK)
    R = world * case.T * min(case.K, place.num_local)
    rows_RD = torch.randn(R, case.D, device="cuda", dtype=torch.bfloat16)
    runs = (
        partial(push_tokens, x_TD, experts_TK, weights_TK, *place),
        partial(push_sums, rows_RD, row_NK, None, experts_TK, *place),
        partial(push_rows, x_TD, row_NK, experts_TK, R, *place),
        partial(push_sums, tokens_ND, slot_N[:, None], weights_NK, experts_TK, *place),
    )
    return dict(zip(PASSES, map(graphed, runs), strict=True))


def whole(case: Case, kind: str, sms: int) -> dict[str, float]:
    """us of a dispatcher's four passes, eagerly, its local parts included."""
    routing = case.routing()
    dispatcher = build_dispatcher(kind, case.E, dist.group.WORLD, dist.get_world_size(), 1, case.T, sms)
    x_TD = torch.randn(case.T, case.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    routed, handle = dispatcher.dispatch(x_TD, routing)
    rows_RD = torch.randn(len(routed.pair_R), case.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y_TD = dispatcher.combine(rows_RD, handle)
    sent, received = (x_TD, routing.topk_weights_TK), (routed.tokens_ND, routed.weights_P)
    grads = [torch.zeros_like(each) for each in received]
    runs = (
        partial(dispatcher.dispatch, x_TD, routing),
        partial(dispatcher.combine, rows_RD, handle),
        partial(torch.autograd.grad, y_TD, rows_RD, x_TD.detach(), retain_graph=True),
        partial(torch.autograd.grad, received, sent, grads, retain_graph=True),
    )
    return dict(zip(PASSES, map(eager, runs), strict=True))


@torch.no_grad()
def fp8(case: Case, kind: str, recipe: str) -> dict[str, Any]:
    """Tokens that travel packed beside tokens in bf16: us, bytes of a token on its way, and whether the operands are the same."""
    routing, packing = case.routing(), Packing(recipe == "blockwise")
    dispatcher = build_dispatcher(kind, case.E, dist.group.WORLD, dist.get_world_size(), 1, case.T)
    products = Float8Products(packing.blockwise, high_precision_weight_grad=False)
    x_TD = torch.randn(case.T, case.D, device="cuda", dtype=torch.bfloat16)
    x_TD[::97] *= 1e4
    words_TW = packing.pack(x_TD)

    def operand(packed: bool) -> list[Tensor]:
        routed, _ = dispatcher.dispatch(x_TD, routing, None, packing.pack(x_TD) if packed else None)
        tokens = routed.tokens_ND if routed.packed_NW is None else packing.received(routed.packed_NW, case.D)
        return [routed.offsets_e, *products.rows(tokens, routed.row_NK, len(routed.pair_R))]

    def same() -> bool:
        (ends, elements, scale), (_, wanted, wanted_scale) = operand(True), operand(False)
        rows = int(ends[-1])
        bits = elements[:rows].view(torch.uint8), wanted[:rows].view(torch.uint8)
        return torch.equal(*bits) and torch.equal(scale[..., :rows], wanted_scale[..., :rows])

    time = graphed if kind == "nvlink" else eager
    runs = {"to operand": partial(operand, True), "to operand, bf16": partial(operand, False)}
    if kind == "nvlink":
        meta = routing.topk_experts_TK, routing.topk_weights_TK, *dispatcher.place
        runs |= {"alone": partial(push_tokens, words_TW, *meta), "alone, bf16": partial(push_tokens, x_TD, *meta)}
    sizes = {"fp8": words_TW.shape[1] * 4, "bf16": case.D * 2}
    return {"same": all_hold(same()), "bytes": sizes, "us": {name: time(run) for name, run in runs.items()}}


def all_hold(here: bool) -> bool:
    return ranks.slowest(not here) == 0


def measure_fp8(options: argparse.Namespace) -> list[dict[str, Any]]:
    entries = []
    for T in options.tokens:
        case = Case(T, options.width, options.experts, options.choices)
        for kind, recipe in product(("nvlink", "alltoall"), ("rowwise", "blockwise")):
            entries.append({"tokens": T, "dispatcher": kind, "recipe": recipe} | fp8(case, kind, recipe))
            torch.cuda.empty_cache()
    return entries


def fp8_lines(entries: list[dict[str, Any]]) -> list[str]:
    lines = []
    for entry in entries:
        us, sizes = entry["us"], entry["bytes"]
        times = [f"{name} {us[name]:.0f} us (bf16 {us[name + ', bf16']:.0f})" for name in ("alone", "to operand") if name in us]
        size = f"{sizes['fp8']} bytes a token (bf16 {sizes['bf16']})"
        verdict = "same operand" if entry["same"] else "BAD: another operand"
        lines.append(", ".join([f"{entry['tokens']} tokens, {entry['dispatcher']}, {entry['recipe']}: {size}", *times, verdict]))
    return lines


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    entries = []
    for T in options.tokens:
        case = Case(T, options.width, options.experts, options.choices)
        payload = case.payload(case.routing().topk_experts_TK)
        runs = {f"nvlink transfers, {sms} SMs": partial(transfers, case, sms) for sms in options.sms}
        runs |= {f"{kind} whole": partial(whole, case, kind, 64) for kind in ("nvlink", "alltoall")}
        for name, run in runs.items():
            entries.append({"tokens": T, "run": name, "payload": payload, "us": run()})
            torch.cuda.empty_cache()
    return entries


def table(entries: list[dict[str, Any]], rates: dict[str, float]) -> str:
    """A row per run: us, GB/s and the share of the best peer copy of each pass; then what NCCL takes over what nvlink takes."""
    best = max(rates.values())
    rows = [["tokens", "MB", "run", *(f"{name}: us" for name in PASSES), *["GB/s (of copy)"] * len(PASSES)]]
    for entry in entries:
        times = [entry["us"][name] for name in PASSES]
        speeds = [entry["payload"] / us / 1e3 for us in times]
        row = [str(entry["tokens"]), f"{entry['payload'] / 1e6:.0f}", entry["run"], *(f"{us:.0f}" for us in times)]
        rows.append(row + [f"{speed:.0f} ({speed / best:.0%})" for speed in speeds])
    order = [0, 1, 2, *(column for i in range(len(PASSES)) for column in (3 + i, 3 + len(PASSES) + i))]
    rows = [[row[column] for column in order] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    copies = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items())
    return "\n".join([f"peer copy: {copies}", "", *lines, "", *_ratios(entries)])


def _ratios(entries: list[dict[str, Any]]) -> list[str]:
    lines, wholes = [], {(entry["tokens"], entry["run"]): entry["us"] for entry in entries if entry["run"].endswith("whole")}
    for tokens in dict.fromkeys(entry["tokens"] for entry in entries):
        nccl, ours = wholes[tokens, "alltoall whole"], wholes[tokens, "nvlink whole"]
        forward, all_four = (sum(map(nccl.get, names)) / sum(map(ours.get, names)) for names in (PASSES[:2], PASSES))
        lines.append(f"{tokens} tokens: alltoall over nvlink {forward:.2f} x forward, {all_four:.2f} x with backward")
    return lines


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return numbers


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[8192, 32768], help="tokens of a rank, by commas")
    parser.add_argument("--sms", type=_numbers, default=[16, 32, 64, 132], help="multiprocessors for a transfer, by commas")
    parser.add_argument("--width", type=int, default=2048, help="elements of a token")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--choices", type=int, default=8, help="experts of a token")
    parser.add_argument("--fp8", action="store_true", help="also tokens that travel in FP8")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/dispatch", help="folder for the results")
    parser.add_argument("--commit", default=environment.commit(), help="where the folder is no git checkout")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    if reason := ranks.missing("benchmarks/dispatch.py"):
        print(reason, file=sys.stderr)
        return 2
    ranks.join()
    rates, entries = peer_copy_rates(), measure(options)
    in_fp8 = measure_fp8(options) if options.fp8 else []
    if dist.get_rank() == 0:
        command = ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "benchmarks/dispatch.py", *argv]
        report = environment.report(command, options.commit) | {
            "shape": {"width": options.width, "experts": options.experts, "choices": options.choices},
            "peer_copy_gb_per_s": rates,
            "results": entries,
            "fp8": in_fp8,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "dispatch.json").write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join([environment.heading(report), "", table(entries, rates), "", *fp8_lines(in_fp8)]))
    dist.destroy_process_group()
    return 0 if all(entry["same"] for entry in in_fp8) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
