"""metrics.jsonl, console line, progress bar, TensorBoard and log files of a run."""

import io
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_titan.log import setup_logging
from moe_titan.metrics import MetricsLogger, load_statistics, peak_memory_gib

CPU = torch.device("cpu")


def make_config(folder: Path, **metrics: object) -> SimpleNamespace:
    defaults = {
        "log_freq": 1,
        "enable_tensorboard": False,
        "save_tb_folder": "tb",
        "progress_bar": True,
        "disable_color_printing": False,
    }
    return SimpleNamespace(job=SimpleNamespace(dump_folder=str(folder)), metrics=SimpleNamespace(**(defaults | metrics)))


def log_step(metrics: MetricsLogger, step: int, **values: object) -> None:
    defaults = {
        "loss": 1 / 3,
        "grad_norm": 2.5,
        "lr": 1e-3,
        "tokens": 512 * step,
        "step_tokens_per_rank": 128,
        "step_seconds": 0.5,
        "data_seconds": 0.25,
    }
    metrics.log(step, **(defaults | values))


def read(folder: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_record(tmp_path: Path) -> None:
    metrics = MetricsLogger(make_config(tmp_path), 0, 6e9, CPU, total_steps=10)
    load = {"layers.0.moe": torch.tensor([4, 0, 8]), "layers.1.moe": torch.tensor([5, 5, 5])}
    log_step(metrics, 1, expert_load=load, extra={"balance_loss": 0.01})
    metrics.close()
    (record,) = read(tmp_path)
    assert record.pop("memory_gib") == pytest.approx(peak_memory_gib(CPU), rel=0.2)
    assert record.pop("expert_load") == {
        "layers.0.moe": {"max_over_mean": 2.0, "cv": pytest.approx(math.sqrt(32 / 3) / 4), "dead": 1},
        "layers.1.moe": {"max_over_mean": 1.0, "cv": 0.0, "dead": 0},
    }
    assert record == {
        "step": 1,
        "loss": 1 / 3,
        "grad_norm": 2.5,
        "lr": 1e-3,
        "tokens": 512,
        "tokens_per_second": 256.0,
        "tflops": pytest.approx(256 * 6e9 / 1e12),
        "mfu": None,
        "step_ms": 500.0,
        "data_ms": 250.0,
        "balance_loss": 0.01,
    }


def test_mfu_of_a_known_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    metrics = MetricsLogger(make_config(tmp_path), 0, 7e9, torch.device("cuda", 0), total_steps=10)
    log_step(metrics, 1, step_tokens_per_rank=30_000, step_seconds=1.0)
    metrics.close()
    (record,) = read(tmp_path)
    assert record["mfu"] == pytest.approx(210 / 989)
    assert record["memory_gib"] == 3.0


def test_non_finite_numbers_are_valid_json(tmp_path: Path) -> None:
    metrics = MetricsLogger(make_config(tmp_path), 0, 1.0, CPU, total_steps=10)
    log_step(metrics, 1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, expert_load={"layers.0": torch.zeros(4)})
    metrics.close()
    (record,) = read(tmp_path)
    assert (record["loss"], record["grad_norm"], record["lr"]) == ("nan", "inf", "-inf")
    assert record["expert_load"]["layers.0"] == {"max_over_mean": "nan", "cv": "nan", "dead": 4}


def test_resume_keeps_steps_unique(tmp_path: Path) -> None:
    for first_step in (1, 4):
        metrics = MetricsLogger(make_config(tmp_path), 0, 1.0, CPU, total_steps=6, first_step=first_step)
        for step in range(first_step, 7):
            log_step(metrics, step, loss=float(first_step))
        metrics.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')  # cut off by a crash
    metrics = MetricsLogger(make_config(tmp_path), 0, 1.0, CPU, total_steps=6, first_step=7)
    metrics.close()
    assert [(record["step"], record["loss"]) for record in read(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 4.0),
        (5, 4.0),
        (6, 4.0),
    ]


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = MetricsLogger(make_config(tmp_path, enable_tensorboard=True), 1, 1.0, CPU, total_steps=10)
    log_step(metrics, 1)
    metrics.close()
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_should_log(tmp_path: Path) -> None:
    metrics = MetricsLogger(make_config(tmp_path, log_freq=4), 1, 1.0, CPU, total_steps=10)
    assert [step for step in range(1, 11) if metrics.should_log(step)] == [1, 4, 8, 10]


def test_line_ends_with_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = MetricsLogger(make_config(tmp_path), 0, 1e9, CPU, total_steps=8)
    log_step(metrics, 1)
    log_step(metrics, 2)
    metrics.close()
    first, second = caplog.messages
    assert first.startswith("step 1  loss 0.3333  grad_norm 2.500  lr 1.00e-03  tokens/s/GPU 256  TFLOP/s/GPU 0.256  MFU -")
    assert "step 500 ms  data 250 ms" in first
    assert second.endswith("25% done, 00:00 left")


def test_bar_is_drawn_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (120, 40))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    metrics = MetricsLogger(make_config(tmp_path), 0, 1.0, CPU, total_steps=8, first_step=5)
    log_step(metrics, 6)
    metrics.close()
    assert "75%" in terminal.getvalue() and "6/8" in terminal.getvalue()
    assert "75% done" in caplog.messages[0]


def test_progress_bar_can_be_turned_off(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    metrics = MetricsLogger(make_config(tmp_path, progress_bar=False), 0, 1.0, CPU, total_steps=8)
    log_step(metrics, 1)
    metrics.close()
    assert "left" not in caplog.messages[0]
    assert not terminal.getvalue()


def test_tensorboard(tmp_path: Path) -> None:
    metrics = MetricsLogger(make_config(tmp_path, enable_tensorboard=True), 0, 1.0, CPU, total_steps=8)
    for step in (1, 2):
        log_step(metrics, step, loss=float(step), expert_load={"layers.0.moe": torch.tensor([1, 3])})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert events.Scalars("expert_load/layers.0.moe/max_over_mean")[0].value == 1.5
    assert "mfu" not in events.Tags()["scalars"]


def test_load_statistics_of_one_expert_that_takes_all() -> None:
    statistics = load_statistics(torch.tensor([0, 0, 0, 12]))
    assert statistics == {"max_over_mean": 4.0, "cv": pytest.approx(math.sqrt(3)), "dead": 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_setup_logging(rank: int, tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(str(tmp_path), rank)
    setup_logging(str(tmp_path), rank)
    logging.getLogger("moe_titan.trainer").info("ours")
    logging.getLogger("datasets").info("chatter")
    logging.getLogger("datasets").warning("theirs")
    lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
    assert [line.split()[2:] for line in lines] == [["I", "ours"], ["W", "theirs"]]
    assert capsys.readouterr().err.splitlines() == (lines if rank == 0 else [])
