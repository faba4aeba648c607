"""The output projection with its loss, and both of its gradients: ours beside torch's and Liger's.

python benchmarks/cross_entropy.py [--cases qwen3,deepseek_v3] [--seconds 45] [--out FOLDER]

16384 tokens of width 2048 and the vocabularies of Qwen3 (151936) and DeepSeek-V3 16B (102400); bf16 tokens and weight, random
data, every token trained on; from these to the summed loss and the gradients of both.

ours: kernels/cross_entropy.py as the head calls it. torch: logits in bf16, of which an fp32 copy goes into the cross-entropy.
"slices": the same over 8 slices of the tokens, whose logits are made again for backward. "compiled": torch.compile of it, and
"compiled, chunked" with inductor's auto_chunker in 8 chunks. linear_cross_entropy: torch's own, in chunks, which 2.11 lacks.
Liger: LigerFusedLinearCrossEntropyLoss where liger-kernel is installed, also with its sums of the weight gradient in fp32.

"weight gradient" is its type and how it is added up. "peak MiB" is over tokens and weight, both gradients included. FLOPs are
6 T D V, without what is computed again. Errors against fp64, of the loss and of the worst row of both gradients, relative in the
2-norm: 64 random tokens, and 128 words, half of which are labels of these tokens. A run of which one is not within 0.05 is not
timed. Times are medians by CUDA events.

A word in place of figures: "missing" (not installed, or not in this torch), "wrong", "memory", "refused" with the error printed
above, and "late" for what would have begun later than --seconds after the start. Everything is written to OUT/cross_entropy.json.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.testing import do_bench

from benchmarks.attempts import Unable, measure_all
from benchmarks.moe_layer import MIB, aligned
from kernels.cross_entropy import linear_cross_entropy_sums

IGNORED = -100
ERROR = 0.05  # at most
SLICES = 8
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Case:
    """T tokens of width D, V words."""

    T: int
    D: int
    V: int


CASES = {"qwen3": Case(16384, 2048, 151936), "deepseek_v3": Case(16384, 2048, 102400)}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens [T, D], weight [V, D] and labels [T], summed over tokens


class Problem:
    """A case's random input, and what it should give for some tokens and some words."""

    def __init__(self, case: Case, device: str = "cuda", samples: int = 64):
        self.case = case
        make = partial(torch.randn, dtype=torch.bfloat16, device=device)
        self.h_TD = make(case.T, case.D).requires_grad_()
        self.weight_VD = (make(case.V, case.D) * case.D**-0.5).requires_grad_()
        self.labels_T = torch.randint(case.V, (case.T,), device=device)
        self.tokens_t = torch.randperm(case.T, device=device)[:samples]
        others_v = torch.randperm(case.V, device=device)[:samples]
        self.words_v = torch.cat((self.labels_T[self.tokens_t], others_v))
        self.expected = self._expected()

    def results(self, loss: Loss) -> list[Tensor]:
        """The loss and the gradients of tokens and weight."""
        total = loss(self.h_TD, self.weight_VD, self.labels_T)
        return [total.detach(), *torch.autograd.grad(total, (self.h_TD, self.weight_VD))]

    def errors(self, results: list[Tensor]) -> dict[str, float]:
        loss, grad_h_TD, grad_weight_VD = results
        rows = loss.view(1, 1), grad_h_TD[self.tokens_t], grad_weight_VD[self.words_v]
        return dict(zip(("loss", "tokens", "weight"), map(worst_row, rows, self.expected), strict=True))

    @torch.no_grad()
    def _expected(self, tokens: int = 1024) -> list[Tensor]:
        """The rows that :meth:`errors` compares, in fp64, from the logits of some tokens at a time."""
        h_TD, weight_VD, labels_T = self.h_TD.double(), self.weight_VD.double(), self.labels_T
        lse_T = torch.cat([(h_tD @ weight_VD.t()).logsumexp(1) for h_tD in h_TD.split(tokens)])
        loss = (lse_T - (h_TD * weight_VD[labels_T]).sum(1)).sum()
        t, v = self.tokens_t, self.words_v
        grad_tV = (h_TD[t] @ weight_VD.t() - lse_T[t, None]).exp()
        grad_tV[torch.arange(len(t), device=t.device), labels_T[t]] -= 1
        grad_Tv = (h_TD @ weight_VD[v].t() - lse_T[:, None]).exp() - (labels_T[:, None] == v).double()
        return [loss.view(1, 1), grad_tV @ weight_VD, grad_Tv.t() @ h_TD]


def worst_row(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row in the 2-norm; infinite where one is no number."""
    error = ((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    return error if error == error else float("inf")


def ours(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    return linear_cross_entropy_sums(h_TD, weight_VD, labels_T, IGNORED, (1.0,))[0]


def plain(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy((h_TD @ weight_VD.t()).float(), labels_T, ignore_index=IGNORED, reduction="sum")


def in_slices(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    slices = zip(h_TD.chunk(SLICES), labels_T.chunk(SLICES), strict=True)
    return sum(checkpoint(plain, h_tD, weight_VD, labels_t, use_reentrant=False) for h_tD, labels_t in slices)


def compiled(chunks: int | None = None) -> Loss:
    # Without the lower threshold no product is thought worth cutting at these sizes.
    options = {"auto_chunker.enable": True, "auto_chunker.num_chunk": chunks, "auto_chunker.amplify_ratio_threshold": 2}
    return torch.compile(plain, dynamic=False, options=options if chunks else None)


def torchs_own() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unable("missing")
    return partial(F.linear_cross_entropy, reduction="sum", options=torch.nn.LinearCrossEntropyOptions())


def liger(sums: torch.dtype | None = None) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", accum_dtype=sums)
    return lambda h_TD, weight_VD, labels_T: module(weight_VD, h_TD, labels_T)


# What makes the loss, and how the weight gradient is added up. The slow compilations last, so that a run cut short has lost the
# least.
RUNS: dict[str, tuple[Callable[[], Loss], str]] = {
    "ours": (lambda: ours, "fp32 sums"),
    "torch": (lambda: plain, "one product"),
    "torch, slices": (lambda: in_slices, "bf16 sums"),
    "linear_cross_entropy": (torchs_own, "bf16 sums"),
    "Liger": (liger, "bf16 sums"),
    "Liger, fp32": (partial(liger, torch.float32), "fp32 sums"),
    "torch, compiled": (compiled, "one product"),
    "torch, compiled, chunked": (partial(compiled, SLICES), "bf16 sums"),
}


def check(problem: Problem, loss: Loss) -> dict[str, Any]:
    """``errors``, and the type of the weight gradient."""
    results = problem.results(loss)
    errors = problem.errors(results)
    if not max(errors.values()) < ERROR:
        print(_errors(errors), flush=True)
        raise Unable("wrong")
    return {"errors": errors, "type": NAMES[results[2].dtype]}


def measure(problem: Problem, run: str) -> dict[str, Any]:
    """What :func:`check` finds, ``ms`` and ``tflops`` of loss and gradients together, ``peak_bytes``."""
    build, sums = RUNS[run]
    loss, case = build(), problem.case
    found = check(problem, loss) | {"sums": sums}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.results(loss)
    peak = torch.cuda.max_memory_allocated() - before
    ms = do_bench(lambda: problem.results(loss), warmup=50, rep=300, return_mode="median")
    return found | {"ms": ms, "tflops": 6e-9 * case.T * case.D * case.V / ms, "peak_bytes": peak}


def _errors(errors: dict[str, float]) -> str:
    return "errors " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def line(found: dict[str, Any]) -> str:
    figures = f"{found['ms']:.2f} ms, {found['tflops']:.0f} TFLOP/s, peak {found['peak_bytes'] / MIB:,.0f} MiB"
    return f"{figures}; weight gradient {found['type']}, {found['sums']}; {_errors(found['errors'])}"


HEAD = ["vocabulary", "run", "weight gradient", "ms", "TFLOP/s", "peak MiB", "loss error", "tokens error", "weight error"]


def table(entries: list[dict[str, Any]]) -> str:
    """A row per run, by cases; where something failed, the reason stands in place of the time."""
    return aligned([HEAD, *(_row(entry) for case in CASES for entry in entries if entry["case"] == case)], 3)


def _row(entry: dict[str, Any]) -> list[str]:
    row = [str(CASES[entry["case"]].V), entry["run"]]
    if entry["reason"]:
        return row + ["-", entry["reason"]] + ["-"] * (len(HEAD) - 4)
    row += [f"{entry['type']}, {entry['sums']}", f"{entry['ms']:.2f}", f"{entry['tflops']:.0f}"]
    return row + [f"{entry['peak_bytes'] / MIB:,.0f}", *(f"{error:.1e}" for error in entry["errors"].values())]


def main(argv: list[str]) -> int:
    return measure_all(
        argv, "cross_entropy", __doc__, list(CASES), list(RUNS), lambda case: Problem(CASES[case]), measure, line, table
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
