"""The command line: exit codes, messages, and what a run leaves in its folder."""

import fcntl
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trainer_runs
from trainer_runs import MODELS, arguments, layout

from moe_titan.checkpoint import complete_steps
from moe_titan.config.sections import KEYS

ROOT = Path(__file__).resolve().parents[2]
METRICS = {
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops", "mfu", "step_ms", "data_ms"),
    *("memory_gib", "expert_load"),
}


def train_py(*argv: str) -> subprocess.CompletedProcess:
    """Runs train.py without a launcher."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "train.py", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return trainer_runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def test_help_lists_every_key() -> None:
    result = train_py("--help")
    assert result.returncode == 0, result.stderr
    missing = [name for name, key in KEYS.items() if name not in result.stdout or key.doc[:20] not in result.stdout]
    assert not missing


def test_wrong_input_exits_with_2(corpus, tmp_path) -> None:
    result = train_py(*arguments(corpus, tmp_path / "run", MODELS["qwen3"]), "--training.step=5")
    assert result.returncode == 2
    assert result.stderr == 'command line: training.step = "5": unknown key in [training]; did you mean steps?\n'
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"training.steps": "many"}, ['training.steps = "many"', "must be an integer"]),
        (layout(ep=3), ["parallelism.expert_parallel_degree = 3", "must divide"]),
        (layout(tp=2), ["parallelism.tensor_parallel_degree = 2", "must divide 1"]),
        ({"training.dataset_path": "nowhere"}, ['training.dataset_path = "nowhere"', "existing file or folder"]),
        ({"model.overrides.vocab_size": 256}, ["model.overrides.vocab_size", "ids up to 258", "at least 259"]),
        ({"checkpoint.load_step": 7}, ["checkpoint.load_step = 7", "holds the steps none"]),
        ({"checkpoint.initial_load_path": ROOT}, [f"checkpoint.initial_load_path = {ROOT}", "no complete checkpoint"]),
    ],
)
def test_refusals(pool, corpus, tmp_path, settings, fragments) -> None:
    argv = [*arguments(corpus, tmp_path / "run", MODELS["qwen3"])]
    argv += [f"--{key}={value}" for key, value in settings.items()]
    [(code, error, _)] = pool.run(1, trainer_runs.main, argv, group=False)
    assert code == 2
    assert "Traceback" not in error
    for fragment in fragments:
        assert fragment in error
    assert not (tmp_path / "run").exists()


def test_the_first_process_speaks_first(pool, corpus, tmp_path) -> None:
    """The others wait for the launcher to end them, lest it ends the first before its message is out."""
    argv = arguments(corpus, tmp_path, MODELS["qwen3"], {"training.steps": 0})
    first, second = pool.run(2, trainer_runs.main, argv, group=False)
    assert first == (2, first[1], False)
    assert second == (2, first[1], True)


@pytest.fixture(scope="module")
def debug_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Two steps of debug.toml in one process without a launcher."""
    folder = tmp_path_factory.mktemp("debug")
    changes = layout(tp=1, dps=-1, ep=1) | {
        "job.dump_folder": folder,
        "training.steps": 2,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": 1,
    }
    changes = [f"--{key}={value}" for key, value in changes.items()]
    return folder, train_py("--config", "train_configs/debug.toml", *changes)


def test_nothing_to_gather_in_fp8(pool, corpus, tmp_path) -> None:
    """Three experts, of which two ranks cannot shard whole ones: known only once the model has been laid out."""
    sizes = {"dim": 128, "head_dim": 16, "moe_inter_dim": 128, "moe_args.num_experts": 3}
    settings = MODELS["qwen3"] | {f"model.overrides.{name}": size for name, size in sizes.items()}
    settings |= {"training.mixed_precision_param": "bfloat16", "float8.expert_recipe": "blockwise", "float8.all_gather": True}
    argv = arguments(corpus, tmp_path / "run", settings)
    (code, error, _), _ = pool.run(2, trainer_runs.main_as_on_hopper, argv, group=False)
    assert code == 2 and error.startswith("command line: float8.all_gather = true: gathers nothing: ")
    assert "set it to false" in error


def test_debug_run(debug_run) -> None:
    folder, result = debug_run
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line.keys() == METRICS
        assert list(line["expert_load"]) == [f"layers.{layer}" for layer in range(4)]
        assert {statistic for load in line["expert_load"].values() for statistic in load} == {"max_over_mean", "cv", "dead"}
        assert line["tokens"] == 4 * 128 * line["step"]
        assert 0 < line["data_ms"] < line["step_ms"]
    assert 5 < lines[0]["loss"] < 7
    assert complete_steps(folder / "checkpoint") == {2}
    assert list((folder / "tb").glob("events.*"))
    log = (folder / "logs" / "rank-0.log").read_text()
    for line in ("debug: Qwen3-style MoE", "step 1  loss", "step 2  loss", "saved", "training ends at step 2"):
        assert line in log
        assert line in result.stderr


def test_the_written_configuration_starts_the_same_run(pool, debug_run) -> None:
    folder, _ = debug_run
    written = (folder / "config.toml").read_text()
    assert tomllib.loads(written)["training"]["global_batch_size"] == 4
    [(code, error, _)] = pool.run(1, trainer_runs.main, ["--config", str(folder / "config.toml")], group=False)
    assert (code, error) == (0, "")
    again = tomllib.loads((folder / "config.toml").read_text())
    assert again["job"].pop("config_file") == str(folder / "config.toml")
    first = tomllib.loads(written)
    first["job"].pop("config_file")
    assert again == first
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_folder_that_cannot_be_written(pool, corpus, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    argv = arguments(corpus, tmp_path / "file", MODELS["qwen3"])
    [(code, error, _)] = pool.run(1, trainer_runs.main, argv, group=False)
    assert code == 2
    assert "job.dump_folder" in error and "must be a folder that can be written" in error


def test_folder_of_a_run_that_goes_on(pool, corpus, tmp_path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [(code, error, _)] = pool.run(1, trainer_runs.main, arguments(corpus, tmp_path, MODELS["qwen3"]), group=False)
    assert code == 2
    assert "job.dump_folder" in error and "another run is writing there" in error


def test_divergence_is_a_failure_of_the_run(corpus, tmp_path) -> None:
    argv = arguments(corpus, tmp_path, MODELS["qwen3"], {"optimizer.lr": 1e30, "lr_scheduler.warmup_steps": 0})
    result = train_py(*argv, "--checkpoint.interval=1")
    assert result.returncode == 1
    assert "NonFiniteGradient: gradient is not finite; first in tok_embeddings.weight on rank 0" in result.stderr
    assert "in step 2 on rank 0" in result.stderr
    assert complete_steps(tmp_path / "checkpoint") == {1}
