"""What benchmarks/attention.py measures, on the CPU in small: all attend alike, wrong ones are found; its table."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks import attention
from benchmarks.attempts import Unable
from benchmarks.moe_layer import relative_error

ROOT = Path(__file__).resolve().parents[2]
HEADS = [(4, 2, 16, 16), (3, 3, 24, 16)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def problem(heads: tuple[int, ...], documents: int) -> attention.Problem:
    return attention.Problem(attention.Case(*heads, B=2, S=37, documents=documents), "cpu")


def flash_by_documents(q: Tensor, k: Tensor, v: Tensor, cu_seq_q, cu_seq_k, max_q, max_k, window_size) -> Tensor:
    """In place of torch's, which needs a GPU."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32 and window_size == (-1, 0)
    assert max_q == max_k == cu_seq_q.diff().max() and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(q)
    assert v.shape[-1] == q.shape[-1]
    parts = zip(*(x.transpose(0, 1).split(cu_seq_q.diff().tolist(), 1) for x in (q, k, v)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*part, is_causal=True, enable_gqa=True).transpose(0, 1) for part in parts])


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("run", ["ours", "Flash"])
def test_all_attend_alike(run, heads, documents) -> None:
    case = problem(heads, documents)
    with patch.object(attention, "varlen_attn", flash_by_documents):
        found = attention.check(case, attention.RUNS[run](case))
    assert list(found["errors"]) == ["out", "q", "k", "v"] and found["same_bits"]
    assert 1e-4 < max(found["errors"].values()) < attention.ERROR  # of bf16


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_flex_attends_alike(heads, documents) -> None:
    case = problem(heads, documents)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():  # it has no gradients on the CPU
        out = attention.flex(case)(*(x.detach() for x in case.qkv))
    assert relative_error(case.compared(out), case.expected[0]) < attention.ERROR


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_wrong_results_are_found(heads, capsys) -> None:
    case, whole = problem(heads, 5), problem(heads, 1)
    with pytest.raises(Unable, match="wrong"):
        attention.check(case, attention.ours(whole))  # documents not kept apart
    good = case.results(attention.ours(case))
    for i, name in enumerate(("out", "q", "k", "v")):
        bad = [x.clone() for x in good]
        bad[i][-1, -1, -1] *= -1
        wrong = {other for other, error in case.errors(bad).items() if not error < attention.ERROR}
        assert wrong == {name}
        bad[i][-1, -1, -1] = torch.nan
        assert case.errors(bad)[name] == float("inf")
    assert "errors out" in capsys.readouterr().out


def test_other_bits_are_found() -> None:
    case = problem(HEADS[0], 1)
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(len(calls))
        return attention.ours(case)(q, k, v) * (1 + 0.004 * (len(calls) % 2))

    assert not attention.check(case, attend)["same_bits"]


def test_what_cudnn_does_not_take() -> None:
    with pytest.raises(Unable, match="documents"):
        attention.cudnn(problem(HEADS[0], 5))


def test_documents_and_pairs() -> None:
    assert problem(HEADS[0], 1).pairs() == 2 * 37 * 38 // 2
    case = problem(HEADS[0], 5)
    assert case.begins_BS.sum(1).tolist() == [5, 5] and case.begins_BS[:, 0].all()
    document_BS = case.begins_BS.cumsum(1)
    assert case.pairs() == sum(int((row[:, None] == row).tril().sum()) for row in document_BS)
    assert torch.equal(problem(HEADS[0], 5).begins_BS, case.begins_BS)  # drawn with a seed


def entry(case: str, run: str, reason: str | None = None) -> dict:
    times = {"forward_ms": 0.825, "forward_tflops": 416.4, "backward_ms": 2.767, "backward_tflops": 323.0}
    checks = {"errors": {"out": 1.9e-3, "q": 2.6e-3, "k": 2.5e-3, "v": 2.3e-3}, "same_bits": run == "ours"}
    return {"case": case, "run": run, "reason": reason} | ({} if reason else times | checks)


def test_table() -> None:
    entries = [entry(case, "ours") for case in ("mla-4x4096", "qwen3-4x4096")]
    entries += [
        entry("qwen3-4x4096-documents", "cuDNN", "documents"),
        entry("mla-4x4096", "Flash"),
        entry("qwen3-4x4096", "Flash"),
    ]
    lines = [line.split() for line in attention.table(entries).splitlines()]
    figures = ["0.825", "416", "2.767", "323", "2.6e-03"]
    assert lines[1:] == [
        ["qwen3-4x4096", "ours", *figures, "yes"],
        ["qwen3-4x4096", "Flash", *figures, "no"],
        ["qwen3-4x4096-documents", "cuDNN", "documents", *"-----"],
        ["mla-4x4096", "ours", *figures, "yes"],
        ["mla-4x4096", *"Flash, values padded to 192".split(), *figures, "no"],
    ]
    assert attention.line(entries[0]) == (
        "forward 0.825 ms, 416 TFLOP/s; backward 2.767 ms, 323 TFLOP/s; "
        "errors out 1.9e-03, q 2.6e-03, k 2.5e-03, v 2.3e-03; same bits"
    )


def test_without_a_gpu() -> None:
    command = [sys.executable, "benchmarks/attention.py", "--commit", "abc"]
    result = subprocess.run(command, cwd=ROOT, env={"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert result.returncode == 2 and "measures a GPU, and torch finds none" in result.stderr
