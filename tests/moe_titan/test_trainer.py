"""Training runs as a whole: accumulation, schedule, repetition, divergence, reports, and models beside the MoE ones."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import trainer_runs
from layout_runs import relative_error
from trainer_runs import MODELS, arguments, layout, records

from moe_titan.checkpoint import complete_steps
from moe_titan.lr_schedule import lr_factor

NO_CHECKPOINT = {"checkpoint.enable": False}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return trainer_runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def train(pool, corpus, tmp_path_factory):
    """Runs without checkpoints: their records and the final state of rank 0; equal runs run once."""
    cache: dict[str, tuple[list[dict], dict]] = {}

    def run(model: str, world: int = 1, **settings) -> tuple[list[dict], dict]:
        key = f"{model} {world} {settings}"
        if key not in cache:
            folder = tmp_path_factory.mktemp("run")
            named = {name.replace("__", "."): value for name, value in settings.items()}
            argv = arguments(corpus, folder, MODELS[model], NO_CHECKPOINT, named)
            ends = [end for _, end in pool.run(world, trainer_runs.run, argv, group=False)]
            cache[key] = records(folder), ends[0]
        return cache[key]

    return run


def assert_same_run(actual: tuple[list[dict], dict], expected: tuple[list[dict], dict], tolerance: float = 1e-5) -> None:
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance)
        assert (mine["lr"], mine["tokens"]) == (other["lr"], other["tokens"])
        assert mine.get("expert_load") == other.get("expert_load")
    parameters, wanted = actual[1]["parameters"], expected[1]["parameters"]
    errors = {name: relative_error(parameters[name], value) for name, value in wanted.items()}
    assert max(errors.values()) <= tolerance, errors


def test_accumulated_micro_batches_are_one_batch(train) -> None:
    small = train("deepseek", training__local_batch_size=1, training__global_batch_size=4)
    assert_same_run(small, train("deepseek", training__local_batch_size=4, training__global_batch_size=4))
    assert small[0][-1]["loss"] < small[0][0]["loss"] - 0.3


def test_learning_rates(train) -> None:
    schedule = {"warmup_steps": 2, "decay_ratio": 0.5, "decay_type": "cosine", "min_lr_factor": 0.2}
    lines, _ = train("llama3", **{f"lr_scheduler__{name}": value for name, value in schedule.items()})
    expected = [1e-2 * lr_factor(step, total_steps=6, **schedule) for step in range(6)]
    assert [line["lr"] for line in lines] == expected
    assert len(set(expected)) == 4


@pytest.mark.parametrize(("model", "world", "degrees"), [("deepseek", 1, {}), ("qwen3", 4, {"tp": 2, "dps": 2, "ep": 4})])
def test_a_run_repeats_bitwise(pool, corpus, tmp_path, model, world, degrees) -> None:
    ends = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        argv = arguments(corpus, folder, MODELS[model], layout(**degrees), NO_CHECKPOINT)
        ends.append([end for _, end in pool.run(world, trainer_runs.run, argv, group=False)])
    for first, second in zip(*ends, strict=True):
        for part in ("parameters", "moments", "bias"):
            for name, value in first[part].items():
                np.testing.assert_array_equal(second[part][name], value, err_msg=name)
    first, second = (records(tmp_path / name) for name in ("first", "second"))
    for key in ("loss", "grad_norm", "expert_load"):
        assert [line[key] for line in first] == [line[key] for line in second]


@pytest.mark.parametrize(
    ("model", "world", "degrees"),
    [
        ("qwen3_tied", 2, {"dps": 2}),
        ("qwen3_tied", 2, {"tp": 2}),
        ("qwen3_tied", 2, {"dpr": 2}),
        ("llama3", 2, {"dps": 2}),
        ("llama3", 2, {"tp": 2}),
        ("deepseek_flex", 2, {"tp": 2, "ep": 2}),
        ("deepseek_flex", 2, {"dps": 2, "etp": 2}),
    ],
)
def test_models_on_two_ranks(train, model, world, degrees) -> None:
    assert_same_run(train(model, world, **layout_keys(degrees)), train(model))


def layout_keys(degrees: dict[str, int]) -> dict[str, int]:
    return {name.replace(".", "__"): degree for name, degree in layout(**degrees).items()}


@pytest.mark.parametrize(("world", "degrees"), [(1, {}), (2, {"dps": 2}), (2, {"tp": 2})])
def test_tied_weights_stay_one(pool, corpus, tmp_path, world, degrees) -> None:
    argv = arguments(corpus, tmp_path, MODELS["qwen3_tied"], layout(**degrees), NO_CHECKPOINT)
    for before, after in pool.run(world, trainer_runs.tied_weights, argv, group=False):
        assert before["tok_embeddings"].any()
        np.testing.assert_array_equal(before["tok_embeddings"], before["output"])
        np.testing.assert_array_equal(after["tok_embeddings"], after["output"])
        assert relative_error(after["output"], before["output"]) > 0.01


@pytest.mark.parametrize(
    ("tweak", "where", "loss"),
    [
        (trainer_runs.infinite_gradient_on_rank_1, "first in layers.1.moe.experts.w2 on rank 1 (2 parameters there)", None),
        (trainer_runs.weight_is_nan_on_rank_1, "first in tok_embeddings.weight on rank 0", "nan"),
    ],
)
def test_a_run_stops_at_the_first_number_that_is_not_finite(pool, corpus, tmp_path, tweak, where, loss) -> None:
    argv = arguments(corpus, tmp_path, MODELS["qwen3"], layout(dps=2, ep=2))
    failed = pool.run(2, trainer_runs.failing_run, argv, tweak, group=False)
    for rank, (error, before, after) in enumerate(failed):
        assert "gradient is not finite; " + where in error
        assert error.endswith(f"in step 5 on rank {rank}")
        if loss:
            assert f"the loss is {loss}" in error
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3, 4]
    assert complete_steps(tmp_path / "checkpoint") == {3}
    resumed = pool.run(2, trainer_runs.run, argv, group=False)
    assert [start["progress"][0] for start, _ in resumed] == [3, 3]
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(line["loss"]) for line in records(tmp_path))


def test_balance_loss_is_reported(train) -> None:
    lines, _ = train("deepseek", moe__sequence_balance_loss_coeff=0.1, moe__batch_balance_loss_coeff=0.1)
    # At balance E / K * sum_e (K / E) (1 / E) = 1 for either of the two, and a little more where it is not.
    assert all(0.2 * 0.9 < line["balance_loss"] < 0.2 * 3 for line in lines)
    plain, _ = train("deepseek")
    assert not any("balance_loss" in line for line in plain)
    assert lines[0]["loss"] == plain[0]["loss"]
    assert lines[-1]["loss"] != plain[-1]["loss"]


def test_traces_are_written(pool, corpus, tmp_path) -> None:
    profiling = {
        "profiling.enable_profiling": True,
        "profiling.profile_freq": 3,
        "profiling.profiler_warmup": 1,
        "training.gc_freq": 1,
    }
    argv = arguments(corpus, tmp_path, MODELS["qwen3"], NO_CHECKPOINT, profiling)
    pool.run(1, trainer_runs.run, argv, group=False)
    traces = sorted(path.name for path in (tmp_path / "profile_traces").iterdir())
    assert traces == ["rank0_step3.json.gz", "rank0_step6.json.gz"]
    events = json.loads(gzip.open(tmp_path / "profile_traces" / traces[0]).read())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


def test_collections_and_timeouts(pool, corpus, tmp_path) -> None:
    """Python collects garbage when told to, and collectives get less time once each rank has taken a step, resumed or not."""
    settings = {"training.gc_freq": 2, "training.steps": 3, "comm.init_timeout_seconds": 90, "comm.train_timeout_seconds": 70}
    argv = arguments(corpus, tmp_path, MODELS["llama3"], settings)
    assert pool.run(1, trainer_runs.collections_and_timeout, argv, group=False) == [([(), (1,)], False, 70)]
    more = [*argv, "--training.steps=6"]
    assert pool.run(1, trainer_runs.collections_and_timeout, more, group=False) == [([(), (1,), (1,)], False, 70)]


def test_tokens_are_counted_over_all_ranks(train) -> None:
    alone, _ = train("deepseek")
    assert [line["tokens"] for line in alone] == [12 * 24 * step for step in range(1, 7)]
    for line in alone:
        assert line["tokens_per_second"] == pytest.approx(12 * 24 / line["step_ms"] * 1e3)
        assert line["mfu"] is None
    shared, _ = train("deepseek_flex", 2, **layout_keys({"dps": 2, "etp": 2}))
    for line in shared:
        assert line["tokens_per_second"] == pytest.approx(12 * 24 / 2 / line["step_ms"] * 1e3)


def test_every_step_is_as_long_as_it_takes(pool, corpus, tmp_path) -> None:
    """The last one too, though the host waits for it right after the one before."""
    argv = arguments(corpus, tmp_path, MODELS["llama3"], NO_CHECKPOINT)
    pool.run(1, trainer_runs.slow_data_run, argv, 0.2, group=False)
    lines = records(tmp_path)
    assert len(lines) == 6
    for line in lines:
        assert 200 <= line["data_ms"] < line["step_ms"] < 1e4
