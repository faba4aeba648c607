"""Attention of one layer alone, forward and backward, over whole rows and within documents: ours beside what torch has.

python benchmarks/attention.py [--cases qwen3,mla-4x4096,...] [--seconds 45] [--out FOLDER]

Heads of Qwen3-30B-A3B (qwen3: 32, of keys 4, all 128 wide) and of DeepSeek-V3 16B (mla: 16, queries and keys 192 wide, values
128), 4 rows of 4096 tokens and one of 16384, causal; "documents": five a row, of random lengths. bf16, random data.

ours: kernels/document_attention.py. cuDNN: torch's scaled dot-product attention with that backend, which takes no documents.
Flash: the same with FlashAttention-2, within documents torch's varlen_attn; where values are narrower than keys, they are padded
to their width, in the time that is measured. flex: flex attention, compiled, with one program for whole rows and documents. What
is found once for all layers (documents, block masks) is not in the times.

Every run first has its output and gradients compared with fp64 over the last document of the last key head; "error" is the
largest relative error of the four in the 2-norm, and a run that is not within 1e-2 is not timed. "same bits": whether another
run gave the same ones. Times are medians by CUDA events with a cold L2. FLOPs are those of the pairs of tokens that attend to
each other: 2 (D + DV) forward and 2 (3 D + 2 DV) backward a pair and head, for keys of width D and values of width DV.

A word in place of figures: "documents" where there is nothing that takes them, "wrong", "memory", "refused" with the error
printed above, and "late" for what would have begun later than --seconds after the start. Most of the time is compilation; what
has been compiled is found again by the next run on the same machine. Everything is written to OUT/attention.json.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, which need not be installed

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from triton.testing import do_bench

from benchmarks.attempts import Unable, measure_all
from benchmarks.moe_layer import aligned, relative_error
from kernels.document_attention import document_attention, find_documents

ERROR = 1e-2  # at most


@dataclass(frozen=True)
class Case:
    """H heads of queries, Hk of keys and values; queries and keys D wide, values DV; B rows of S tokens and their documents."""

    H: int
    Hk: int
    D: int
    DV: int
    B: int
    S: int
    documents: int


CASES = {
    f"{model}-{B}x{S}{'-documents' if documents > 1 else ''}": Case(*heads, B, S, documents)
    for model, heads in {"qwen3": (32, 4, 128, 128), "mla": (16, 16, 192, 128)}.items()
    for B, S in ((4, 4096), (1, 16384))
    for documents in (1, 5)
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries, keys and values [B, H or Hk, S, D or DV]


class Problem:
    """A case's random input, the gradient of its output, and what it should give."""

    def __init__(self, case: Case, device: str = "cuda"):
        self.case = case
        generator = torch.Generator().manual_seed(0)
        starts_BN = torch.rand(case.B, case.S - 1, generator=generator).topk(case.documents - 1).indices + 1
        begins_BS = torch.zeros(case.B, case.S, dtype=torch.bool).scatter(1, starts_BN, True)
        begins_BS[:, 0] = True
        self.begins_BS = begins_BS.to(device)
        sizes = ((case.H, case.D), (case.Hk, case.D), (case.Hk, case.DV), (case.H, case.DV))
        made = [torch.randn(case.B, case.S, *size, dtype=torch.bfloat16, device=device).transpose(1, 2) for size in sizes]
        self.qkv, self.grad = [x.requires_grad_() for x in made[:3]], made[3]
        self.last = int(begins_BS[-1].nonzero().max())  # where the last document begins in its row
        self.expected = self._expected()

    def pairs(self) -> int:
        """Queries and keys that attend to each other, for one head."""
        first_T = find_documents(self.begins_BS).first_T
        return int((torch.arange(len(first_T), device=first_T.device) - first_T + 1).sum())

    def results(self, attention: Attention) -> list[Tensor]:
        """The output and the gradients of queries, keys and values."""
        out = attention(*self.qkv)
        return [out.detach(), *torch.autograd.grad(out, self.qkv, self.grad)]

    def errors(self, results: list[Tensor]) -> dict[str, float]:
        pairs = zip(("out", "q", "k", "v"), results, self.expected, strict=True)
        return {name: relative_error(self.compared(actual), expected) for name, actual, expected in pairs}

    def compared(self, x_BHSD: Tensor) -> Tensor:
        """Tokens of the last document in the heads that belong to the last key head."""
        return x_BHSD[-1, -(x_BHSD.shape[1] // self.case.Hk) :, self.last :].detach()

    def _expected(self) -> list[Tensor]:
        """:meth:`results` of the slice in fp64, a head at a time."""
        q_HSD, k_1SD, v_1SD, grad_HSD = (self.compared(x).double() for x in (*self.qkv, self.grad))
        future_SS = torch.ones(q_HSD.shape[1], q_HSD.shape[1], dtype=torch.bool, device=q_HSD.device).triu(1)
        outs, grads = [], []
        for q_SD, grad_SD in zip(q_HSD, grad_HSD, strict=True):
            leaves = [x.detach().requires_grad_() for x in (q_SD, k_1SD[0], v_1SD[0])]
            scores_SS = leaves[0] @ leaves[1].t() * self.case.D**-0.5
            out_SD = scores_SS.masked_fill(future_SS, -torch.inf).softmax(1) @ leaves[2]
            outs.append(out_SD.detach())
            grads.append(torch.autograd.grad(out_SD, leaves, grad_SD))
        q_grads, k_grads, v_grads = zip(*grads, strict=True)
        return [torch.stack(outs), torch.stack(q_grads), sum(k_grads)[None], sum(v_grads)[None]]


def ours(problem: Problem) -> Attention:
    return partial(document_attention, documents=find_documents(problem.begins_BS), scale=problem.case.D**-0.5)


def _torch(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])


def cudnn(problem: Problem) -> Attention:
    if problem.case.documents > 1:
        raise Unable("documents")
    return partial(_torch, backend=SDPBackend.CUDNN_ATTENTION)


def flash(problem: Problem) -> Attention:
    case = problem.case
    whole = partial(_torch, backend=SDPBackend.FLASH_ATTENTION)
    attention = whole if case.documents == 1 else _flash_within_documents(problem)
    return attention if case.DV == case.D else _padding_values(attention, case)


def _padding_values(attention: Attention, case: Case) -> Attention:
    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # As [B, S, H, DV], the order in memory: padding in another one would bring copies with it.
        wide_BSHD = F.pad(v.transpose(1, 2), (0, case.D - case.DV))
        return attention(q, k, wide_BSHD.transpose(1, 2)).transpose(1, 2)[..., : case.DV].transpose(1, 2)

    return padded


def _flash_within_documents(problem: Problem) -> Attention:
    B, S = problem.begins_BS.shape
    firsts = problem.begins_BS.flatten().nonzero().flatten()
    edges = F.pad(firsts, (0, 1), value=B * S).int()
    longest = int(edges.diff().max())
    # torch 2.11 takes fewer heads of keys without being told; later ones are to be told.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    varlen = partial(varlen_attn, cu_seq_q=edges, cu_seq_k=edges, max_q=longest, max_k=longest, window_size=(-1, 0), **grouped)

    def attention(*qkv: Tensor) -> Tensor:
        return varlen(*(x.transpose(1, 2).flatten(0, 1) for x in qkv)).unflatten(0, (B, S)).transpose(1, 2)

    return attention


_compiled_flex = torch.compile(flex_attention, dynamic=False)


def flex(problem: Problem) -> Attention:
    B, S = problem.begins_BS.shape
    document_BS = problem.begins_BS.int().cumsum(1)

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document_BS[b, q] == document_BS[b, k])

    mask = create_block_mask(attends, B, None, S, S, device=document_BS.device)
    return partial(_compiled_flex, block_mask=mask, enable_gqa=problem.case.Hk < problem.case.H)


# The slow compilations last, so that a run cut short has lost the least.
RUNS = {"ours": ours, "cuDNN": cudnn, "Flash": flash, "flex": flex}


def check(problem: Problem, attention: Attention) -> dict[str, Any]:
    """``errors``, and whether a second run gives the ``same_bits``."""
    results = problem.results(attention)
    errors = problem.errors(results)
    if not max(errors.values()) < ERROR:
        print(_errors(errors), flush=True)
        raise Unable("wrong")
    return {"errors": errors, "same_bits": all(map(torch.equal, results, problem.results(attention)))}


def measure(problem: Problem, run: str) -> dict[str, Any]:
    """What :func:`check` finds, and of both passes ms and TFLOP/s."""
    attention, case = RUNS[run](problem), problem.case
    found = check(problem, attention)
    out, bench = attention(*problem.qkv), partial(do_bench, warmup=20, rep=100, return_mode="median")
    runs = {
        "forward": (2 * case.D + 2 * case.DV, lambda: attention(*problem.qkv)),
        "backward": (6 * case.D + 4 * case.DV, lambda: torch.autograd.grad(out, problem.qkv, problem.grad, retain_graph=True)),
    }
    for name, (flops, run) in runs.items():
        ms = bench(run)
        found |= {f"{name}_ms": ms, f"{name}_tflops": flops * problem.pairs() * case.H / ms / 1e9}
    return found


def _errors(errors: dict[str, float]) -> str:
    return "errors " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def line(found: dict[str, Any]) -> str:
    times = [f"{name} {found[f'{name}_ms']:.3f} ms, {found[f'{name}_tflops']:.0f} TFLOP/s" for name in ("forward", "backward")]
    return "; ".join([*times, _errors(found["errors"]), "same bits" if found["same_bits"] else "other bits"])


HEAD = ["case", "run", "fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s", "error", "same bits"]


def table(entries: list[dict[str, Any]]) -> str:
    """A row per run, by cases; where something failed, the reason stands first."""
    return aligned([HEAD, *(_row(entry) for case in CASES for entry in entries if entry["case"] == case)], 2)


def _row(entry: dict[str, Any]) -> list[str]:
    case = CASES[entry["case"]]
    padded = entry["run"] == "Flash" and case.DV < case.D
    row = [entry["case"], entry["run"] + (f", values padded to {case.D}" if padded else "")]
    if entry["reason"]:
        return row + [entry["reason"]] + ["-"] * (len(HEAD) - 3)
    for name in ("forward", "backward"):
        row += [f"{entry[f'{name}_ms']:.3f}", f"{entry[f'{name}_tflops']:.0f}"]
    return row + [f"{max(entry['errors'].values()):.1e}", "yes" if entry["same_bits"] else "no"]


def main(argv: list[str]) -> int:
    # So that a backward pass of flex attention can be timed many times over.
    with torch._functorch.config.patch(donated_buffer=False):
        return measure_all(
            argv, "attention", __doc__, list(CASES), list(RUNS), lambda case: Problem(CASES[case]), measure, line, table
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
