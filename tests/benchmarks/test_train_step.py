"""The parts of benchmarks/train_step.py that need no GPU, torchtitan's own code being the reference for its files and log."""

import dataclasses
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.components import metrics
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.tools.utils import Color, NoColor

from benchmarks import (
    peer_torchtitan,  # noqa: F401 (adds its flavors to torchtitan's)
    torchtitan_run,
    train_step,
)
from benchmarks.train_step import Result
from moe_titan.config import load_config
from moe_titan.data import ByteTokenizer, DataLoader
from moe_titan.data.corpora import JsonLines, TextFiles

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def options(*flags):
    return train_step.parse_options(["--commit", "abc", *flags])


def config_of(run, chosen):
    return load_config(train_step.our_flags(run, chosen), chosen.gpus)


@pytest.mark.parametrize("color", [Color(), NoColor()], ids=["color", "plain"])
def test_torchtitan_log_is_read(color, caplog, monkeypatch):
    processor = MetricsProcessor.__new__(MetricsProcessor)
    processor.color, processor.gpu_peak_flops, processor.num_flops_per_token = color, 989e12, 7e9
    processor.parallel_dims = SimpleNamespace(non_data_parallel_size=1)
    processor.job_config = SimpleNamespace(metrics=SimpleNamespace(log_freq=5))
    processor.logger = SimpleNamespace(log=lambda metrics, step: None)
    processor.device_memory_monitor = SimpleNamespace(
        get_peak_stats=lambda: DeviceMemStats(90, 64, 113.987, 81.53, 0, 0), reset_peak_stats=lambda: None
    )
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: 2.0))
    for step, loss, norm in ((1, 12.25, 3.5), (25, float("nan"), 1234.5)):
        processor.ntokens_since_last_log, processor.data_loading_times, processor.time_last_log = 81920, [0.1], 0.0
        with caplog.at_level(logging.INFO):
            processor.log(step, loss, loss, norm)

    lines = [f"[titan] 2026-01-01 00:00:00,000 - root - INFO - {record.getMessage()}" for record in caplog.records]
    lines += ["peak memory allocated: 101.250 GiB", "step: 2 of something else"]
    steps, peak = torchtitan_run.parse_log("".join(f"[rank{rank}]:{line}\n" for line in lines for rank in (1, 0)))
    assert ("\x1b" in lines[0]) == isinstance(color, Color)
    assert [step["step"] for step in steps] == [1, 25]
    assert steps[0]["loss"] == 12.25 and math.isnan(steps[1]["loss"])
    assert [step["grad_norm"] for step in steps] == [3.5, 1234.5]
    assert [step["tokens_per_second"] for step in steps] == [40960, 40960]
    assert steps[0]["memory_reserved_gib"] == 113.99
    assert peak == 101.25


def test_a_log_that_breaks_off_has_no_peak():
    assert torchtitan_run.parse_log("[rank0]:[titan] Training starts at step 1\n") == ([], None)


@pytest.mark.parametrize("shape, flavors", [("A", qwen3_args), ("B", deepseekv3_args)])
@pytest.mark.parametrize(("gpus", "layers"), [((1,), 4), ((1, "--layers", 12), 12), ((2,), 12)])
def test_torchtitan_gets_the_same_settings(shape, flavors, gpus, layers, tmp_path):
    gpus, *more = map(str, gpus)
    chosen = options("--shape", shape, "--gpus", gpus, *more, "--out", str(tmp_path), "--profile")
    config = config_of("torchtitan", chosen)
    (tmp_path / "peer.toml").write_text(torchtitan_run.torchtitan_toml(config, tmp_path / "corpus"))
    peer = ConfigManager().parse_args(["--job.config_file", str(tmp_path / "peer.toml")])
    for section in ("optimizer", "lr_scheduler", "activation_checkpoint", "parallelism", "compile", "profiling"):
        for key, value in vars(getattr(config, section)).items():
            assert getattr(getattr(peer, section), key) == value, f"{section}.{key}"
    for key in ("local_batch_size", "global_batch_size", "seq_len", "steps", "max_norm", "dtype", "gc_freq"):
        assert getattr(peer.training, key) == getattr(config.training, key)
    assert peer.training.dataset_path == str(tmp_path / "corpus")
    assert peer.parallelism.expert_parallel_degree == int(gpus)
    args = flavors[peer.model.flavor]
    assert args.n_layers == config.model.overrides["n_layers"] == layers
    assert dataclasses.replace(args, n_layers=0) == dataclasses.replace(flavors[config.model.flavor], n_layers=0)


@pytest.mark.parametrize("shape", ["A", "B"])
def test_layouts_train_on_the_same_global_batch(shape):
    chosen = options("--shape", shape, "--", "--optimizer.lr", "1e-3")
    configs = {run: config_of(run, chosen) for run in ("ours", "torchtitan", "ours-tp2", "ours-ep1")}
    assert {config.training.global_batch_size for config in configs.values()} == {8}
    degrees = {
        run: (
            config.parallelism.data_parallel_shard_degree,
            config.parallelism.tensor_parallel_degree,
            config.parallelism.expert_parallel_degree,
        )
        for run, config in configs.items()
    }
    assert degrees["ours"] == degrees["torchtitan"] == (2, 1, 2)
    assert degrees["ours-tp2"] == (1, 2, 2)
    assert degrees["ours-ep1"] == (2, 1, 1)
    on_eight = options("--shape", shape, "--gpus", "8", "--routing", "forced")
    degrees = {}
    for run in ("ours-ep4", "ours-tp2", "torchtitan-tp2-ep4-etp2", "ours-dpr2-ep8"):
        eight = config_of(run, on_eight)
        assert eight.training.global_batch_size == 32
        layout = eight.parallelism
        degrees[run] = (layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree, layout.tensor_parallel_degree)
        degrees[run] += (layout.expert_parallel_degree, layout.expert_tensor_parallel_degree)
    assert list(degrees.values()) == [(1, 8, 1, 4, 1), (1, 4, 2, 8, 1), (1, 4, 2, 4, 2), (2, 4, 1, 8, 1)]
    assert eight.debug.moe_force_load_balance and not configs["ours"].debug.moe_force_load_balance
    assert (configs["ours"].optimizer.lr, configs["torchtitan"].optimizer.lr) == (1e-3, 3e-4)


def test_runs_in_fp8():
    chosen = options("--shape", "A", "--runs", "ours,ours-rowwise,ours-tp2-ep2-blockwise")
    flags = {run: train_step.our_flags(run, chosen) for run in chosen.runs}
    for run, expert_recipe in (("ours-rowwise", "rowwise"), ("ours-tp2-ep2-blockwise", "blockwise")):
        at = flags[run].index("--float8.recipe")
        assert flags[run][at : at + 4] == ["--float8.recipe", "rowwise", "--float8.expert_recipe", expert_recipe]
    assert not any("float8" in flag for flag in flags["ours"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--runs", "ours,megatron"], "unknown megatron"),
        (["--runs", "ours-blockwise,torchtitan-rowwise"], "unknown torchtitan-rowwise"),
        (["--runs", "ours,ours"], "each run once"),
        (["--steps", "15"], "at least 20"),
        (["--steps", "52"], "multiple of 5"),
    ],
)
def test_wrong_options_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options("--shape", "A", *flags)
    assert message in capsys.readouterr().err


def test_wrong_layout_is_refused_before_any_run(tmp_path, capsys):
    flags = ["--shape", "A", "--gpus", "1", "--runs", "ours-tp2", "--out", str(tmp_path / "out")]
    assert train_step.main(flags) == 2
    assert "parallelism.tensor_parallel_degree = 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_corpus_is_our_first_epoch(tmp_path, monkeypatch):
    files = [tmp_path / f"{name}.py" for name in "abcdefgh"]
    for file in files:
        file.write_text(f"print('{file.stem} \N{SNOWMAN}')\n" * 40)
    monkeypatch.setattr(torchtitan_run, "stdlib_files", lambda: files)
    torchtitan_run.write_corpus(tmp_path / "corpus", seed=7)
    written = JsonLines([tmp_path / "corpus" / "stdlib.json"], "text")
    texts = [written.document(index) for index in range(len(written))]
    assert sorted(texts) == [file.read_text() for file in files]

    tokenizer = ByteTokenizer()
    sizes = {"seq_len": 500, "local_batch_size": 1, "global_batch_size": 1, "dp_rank": 0, "dp_degree": 1}
    loader = DataLoader(TextFiles(files), tokenizer, **sizes, seed=7)
    ours = loader.next_step()[0].tokens_BS[0]
    assert ours.tolist() == [token for text in texts for token in tokenizer.encode(text)][:500]


def test_throughput_is_the_median_of_whole_timed_windows(tmp_path):
    chosen = options("--shape", "A", "--profile", "--steps", "30")
    speeds = {1: 1, 5: 10, 10: 20, 15: 30_000, 20: 31_000, 25: 50_000, 30: 5}
    result = Result("ours", "", 0.0, steps=[{"step": k, "tokens_per_second": v} for k, v in speeds.items()])
    chosen.dense_rate, chosen.out = 800e12, tmp_path
    train_step.add_throughput(result, config_of("ours", chosen), chosen)
    assert result.of_dense == pytest.approx(result.tflops / 800) and result.idle is None
    assert result.tokens_per_second == 31_000
    assert result.tflops == pytest.approx(31e3 * 7.170686976e9 / 1e12)


def test_table_and_loss_differences():
    def result(run, speed, *losses):
        steps = [{"step": step, "loss": loss} for step, loss in zip((1, 10), losses, strict=False)]
        return Result(run, "", 1.0, None, speed, 230.0, 0.2326, 0.31, 0.004, 0.85, 98.5, None, steps)

    failed = Result("ours-ep1", "", 1.0, error="exit code 1")
    results = [result("ours", 33_000.4, 12.0, 6.0), failed, result("ours-tp2", 27_000.0, 12.0, 6.006)]
    results.append(result("torchtitan", 30_000.0, 12.1, 6.1))
    rows = [line.split() for line in train_step.table(results).splitlines()]
    assert rows[0][:3] == ["run", "tokens/s/GPU", "TFLOP/s/GPU"] and rows[0][-4:] == "loss@1 loss@10 loss@25 loss@50".split()
    assert rows[1] == [
        "ours",
        "33,000",
        "230.0",
        "23.3%",
        "31.0%",
        "0.4%",
        "85.0%",
        "98.5",
        "1.100",
        "12.0000",
        "6.0000",
        "-",
        "-",
    ]
    assert rows[2] == ["ours-ep1"] + ["-"] * 12
    assert rows[4][8] == "1.000"
    assert len({len(line) for line in train_step.table(results).splitlines()}) == 1
    assert train_step.loss_differences(results) == {"ours-tp2 to ours": pytest.approx(1e-3)}
    assert train_step.loss_differences(results[-1:]) == {}


def test_launch_reports_a_failure_and_a_timeout(tmp_path):
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / "log.txt"
    shout = "import os; print(os.environ['HF_HUB_OFFLINE'], os.getcwd()); raise SystemExit(3)"
    assert train_step.launch([sys.executable, "-c", "pass"], log, 60) is None
    assert train_step.launch([sys.executable, "-c", shout], log, 60) == f"exit code 3; {log} ends with\n1 {ROOT}"
    slow = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert train_step.launch(slow, log, 1.0) == f"not done after 1 s; {log} ends with\nbegun"
