"""What benchmarks/cross_entropy.py measures, on the CPU in small: same loss and gradients, wrong ones are found; its table."""

import sys
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import cross_entropy
from benchmarks.attempts import Unable

CASE = cross_entropy.Case(T=80, D=32, V=130)


@pytest.fixture
def problem() -> cross_entropy.Problem:
    torch.manual_seed(0)
    return cross_entropy.Problem(CASE, "cpu", samples=20)


def test_what_is_expected(problem) -> None:
    wide = [x.detach().double().requires_grad_() for x in (problem.h_TD, problem.weight_VD)]
    loss = F.cross_entropy(wide[0] @ wide[1].t(), problem.labels_T, reduction="sum")
    grads = torch.autograd.grad(loss, wide)
    for actual, wanted in zip(
        problem.expected, (loss.view(1, 1), grads[0][problem.tokens_t], grads[1][problem.words_v]), strict=True
    ):
        torch.testing.assert_close(actual, wanted)
    assert torch.equal(problem.words_v[:20], problem.labels_T[problem.tokens_t]) and len(problem.words_v) == 40
    assert max(problem.errors([loss, *grads]).values()) < 1e-12


@pytest.mark.parametrize("run", ["ours", "torch", "torch, slices", "torch, compiled"])
def test_all_compute_the_same(problem, run) -> None:
    with torch.compiler.set_stance("force_eager"):
        found = cross_entropy.check(problem, cross_entropy.RUNS[run][0]())
    assert list(found["errors"]) == ["loss", "tokens", "weight"] and found["type"] == "bf16"
    assert 1e-4 < found["errors"]["weight"] < 0.02  # of bf16


def test_torchs_own(problem) -> None:
    if hasattr(F, "linear_cross_entropy"):
        cross_entropy.check(problem, cross_entropy.torchs_own())
    else:
        with pytest.raises(Unable, match="missing"):
            cross_entropy.torchs_own()


class LigerLoss:
    """Takes what Liger's takes; its kernels need a GPU."""

    def __init__(self, ignore_index: int, reduction: str, accum_dtype: torch.dtype | None):
        assert (ignore_index, reduction) == (cross_entropy.IGNORED, "sum") and accum_dtype in (None, torch.float32)

    def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy.plain(_input, lin_weight, target)


@pytest.mark.parametrize("run", ["Liger", "Liger, fp32"])
def test_liger(problem, run) -> None:
    stand_in = ModuleType("liger_kernel.transformers")
    stand_in.LigerFusedLinearCrossEntropyLoss = LigerLoss
    with patch.dict(sys.modules, {"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.transformers": stand_in}):
        cross_entropy.check(problem, cross_entropy.RUNS[run][0]())
    with patch.dict(sys.modules, {"liger_kernel": None, "liger_kernel.transformers": None}), pytest.raises(ImportError):
        cross_entropy.RUNS[run][0]()


def test_wrong_results_are_found(problem, capsys) -> None:
    with pytest.raises(Unable, match="wrong"):
        cross_entropy.check(problem, lambda h_TD, weight_VD, labels_T: cross_entropy.plain(h_TD, weight_VD, labels_T) * 1.1)
    assert "errors loss 1.0e-01" in capsys.readouterr().out
    good = problem.results(cross_entropy.plain)
    for i, (name, row) in enumerate({"tokens": problem.tokens_t[-1], "weight": problem.words_v[-1]}.items(), 1):
        bad = [x.clone() for x in good]
        bad[i][row] *= 1.1
        wrong = {other for other, error in problem.errors(bad).items() if not error < cross_entropy.ERROR}
        assert wrong == {name}
        bad[i][row] = torch.nan
        assert problem.errors(bad)[name] == float("inf")


def entry(case: str, run: str, reason: str | None = None) -> dict:
    figures = {"ms": 45.5, "tflops": 671.4, "peak_bytes": 3 * 2**30, "type": "bf16", "sums": cross_entropy.RUNS[run][1]}
    errors = {"errors": {"loss": 1e-6, "tokens": 2.5e-3, "weight": 3.5e-3}}
    return {"case": case, "run": run, "reason": reason} | ({} if reason else figures | errors)


def test_table() -> None:
    entries = [entry("deepseek_v3", "ours"), entry("qwen3", "ours"), entry("qwen3", "Liger", "missing")]
    lines = [line.split() for line in cross_entropy.table(entries).splitlines()]
    figures = ["45.50", "671", "3,072", "1.0e-06", "2.5e-03", "3.5e-03"]
    assert lines[1:] == [
        ["151936", "ours", *"bf16, fp32 sums".split(), *figures],
        ["151936", "Liger", "-", "missing", *"-----"],
        ["102400", "ours", *"bf16, fp32 sums".split(), *figures],
    ]
    assert cross_entropy.line(entries[0]) == (
        "45.50 ms, 671 TFLOP/s, peak 3,072 MiB; weight gradient bf16, fp32 sums; "
        "errors loss 1.0e-06, tokens 2.5e-03, weight 3.5e-03"
    )
