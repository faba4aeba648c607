"""Saving and resuming: bitwise on one layout, within rounding on another, and in torchtitan's own format."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_runs
from checkpoint_runs import assert_equal
from layout_runs import relative_error
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint as TorchtitanCheckpoint
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.qwen3.model.model import Qwen3Model
from trainer_runs import MODELS, arguments, layout, records

from moe_titan.checkpoint import complete_steps
from moe_titan.config import build_model_args, load_config

WHOLE_RUN = {"lr_scheduler.total_steps": 6}
# Where runs are saved from. 6 experts in 2 groups leave 3 to be sharded over 2 ranks.
SAVED = {
    "qwen3 on tp2 x dp_shard2, ep4": (4, "qwen3", layout(tp=2, dps=2, ep=4)),
    "deepseek on dp_shard4, ep2": (4, "deepseek", layout(dps=4, ep=2)),
    "deepseek on 1": (1, "deepseek", {}),
    "qwen3_tied on tp2": (2, "qwen3_tied", layout(tp=2)),
    "qwen3 on tp2 x dp_shard2, ep4, experts moving": (4, "qwen3", layout(tp=2, dps=2, ep=4) | {"moe.rebalance_interval": 1}),
    "qwen3 in bf16 on dp_shard2, ep2": (2, "qwen3", layout(dps=2, ep=2) | {"training.mixed_precision_param": "bfloat16"}),
}
OTHER_LAYOUTS = [
    ("deepseek on dp_shard4, ep2", 2, layout(dps=2, ep=2)),
    ("deepseek on dp_shard4, ep2", 2, layout(tp=2)),
    ("deepseek on dp_shard4, ep2", 2, layout(dps=2, etp=2)),
    ("deepseek on dp_shard4, ep2", 2, layout(dpr=2)),
    ("qwen3 on tp2 x dp_shard2, ep4, experts moving", 2, layout(dps=2, ep=2)),
    ("qwen3 on tp2 x dp_shard2, ep4, experts moving", 1, {}),
    ("deepseek on 1", 4, layout(tp=2, dps=2, ep=2, etp=2)),
    ("qwen3_tied on tp2", 2, layout(dps=2)),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return trainer_runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def straight(pool, corpus, tmp_path_factory):
    """Six steps without a break: folder of the run, and the states of the ranks at its end."""
    cache: dict[str, tuple[Path, list[dict]]] = {}

    def run(name: str) -> tuple[Path, list[dict]]:
        if name not in cache:
            world, model, degrees = SAVED[name]
            folder = tmp_path_factory.mktemp("straight")
            argv = arguments(corpus, folder, MODELS[model], WHOLE_RUN, degrees)
            cache[name] = folder, [end for _, end in pool.run(world, trainer_runs.run, argv, group=False)]
        return cache[name]

    return run


def run_one(pool, *argv_parts: Any) -> tuple[dict, dict]:
    return pool.run(1, trainer_runs.run, arguments(*argv_parts), group=False)[0]


def numbers(folder: Path) -> list[tuple]:
    """What a run reports that does not depend on time and place."""
    return [
        tuple(record[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) + (str(record.get("expert_load")),)
        for record in records(folder)
    ]


@pytest.mark.parametrize("name", [name for name in SAVED if name != "deepseek on 1"])
def test_resuming_is_bitwise(pool, corpus, straight, tmp_path, name) -> None:
    world, model, degrees = SAVED[name]
    folder, expected = straight(name)
    argv = arguments(corpus, tmp_path, MODELS[model], WHOLE_RUN, degrees)
    halfway = [end for _, end in pool.run(world, trainer_runs.run, [*argv, "--training.steps=3"], group=False)]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    resumed = pool.run(world, trainer_runs.run, argv, group=False)
    for (start, end), stopped, whole in zip(resumed, halfway, expected, strict=True):
        assert start["progress"] == (3, 3 * 12 * 24, 3)
        assert_equal(start, stopped)
        assert_equal(end, whole)
    assert numbers(tmp_path) == numbers(folder)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("name", "world", "degrees"), OTHER_LAYOUTS, ids=str)
def test_resuming_on_another_layout(pool, corpus, straight, tmp_path, name, world, degrees) -> None:
    folder, expected = straight(name)
    shutil.copytree(folder / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    argv = arguments(corpus, tmp_path, MODELS[SAVED[name][1]], WHOLE_RUN, degrees)
    start, end = pool.run(world, trainer_runs.run, argv, group=False)[0]
    assert start["progress"][0] == 3
    assert any(bias.any() for bias in start["bias"].values()) or not start["bias"]
    before, after = records(folder)[3:], records(tmp_path)
    assert [record["step"] for record in after] == [4, 5, 6]
    for actual, wanted in zip(after, before, strict=True):
        assert (actual["lr"], actual["tokens"]) == (wanted["lr"], wanted["tokens"])
        assert actual.get("expert_load") == wanted.get("expert_load")
        assert actual["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    errors = {key: relative_error(end["parameters"][key], value) for key, value in expected[0]["parameters"].items()}
    assert max(errors.values()) <= 1e-5, errors
    assert_equal(end["counts"], expected[0]["counts"])
    assert end["progress"] == expected[0]["progress"]


@pytest.mark.parametrize(("world", "degrees"), [(1, {}), (2, layout(tp=2, etp=2)), (4, layout(dps=4))], ids=str)
def test_split_and_whole_weights_load_each_other(pool, corpus, straight, tmp_path, world, degrees) -> None:
    """Which parameters lie on one data rank, and are kept as two halves, is the layout's matter, and not the checkpoint's."""
    name = "qwen3 in bf16 on dp_shard2, ep2"
    folder, expected = straight(name)
    shutil.copytree(folder / "checkpoint" / "step-6", tmp_path / "checkpoint" / "step-6")
    bf16 = {"training.mixed_precision_param": "bfloat16"}
    start, _ = pool.run(world, trainer_runs.run, arguments(corpus, tmp_path, MODELS["qwen3"], bf16, degrees), group=False)[0]
    for key in ("parameters", "moments", "counts", "bias", "progress"):
        assert_equal(start[key], expected[0][key], key)
    assert any((value != torch.from_numpy(value).bfloat16().float().numpy()).any() for value in start["parameters"].values())


class Torchtitan:
    """torchtitan's own model, optimizer, schedule and checkpoint manager, in this process."""

    def __init__(self, name: str, corpus: Path, folder: Path, **settings: Any):
        config = load_config(arguments(corpus, folder, MODELS[name]), 1)
        self.model = {"qwen3": Qwen3Model, "deepseek_v3": DeepSeekV3Model}[config.model.name](build_model_args(config))
        with torch.no_grad():
            self.model.init_weights(buffer_device=torch.device("cpu"))
        adam = config.optimizer
        settings_of_adam = {"lr": adam.lr, "betas": (adam.beta1, adam.beta2), "eps": adam.eps, "weight_decay": adam.weight_decay}
        self.optimizers = OptimizersContainer(
            [self.model], torch.optim.AdamW, settings_of_adam | {"fused": True, "foreach": False}
        )
        self.schedule = build_lr_schedulers(self.optimizers, config.lr_scheduler, 6)
        self.progress = TrainState()
        self.manager = CheckpointManager(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.progress},
            checkpoint_config=TorchtitanCheckpoint(
                enable=True, exclude_from_loading=["dataloader"], keep_latest_k=0, interval=1, **settings
            ),
            sd_adapter=None,
            base_folder=str(folder),
        )

    def flat(self) -> dict[str, Any]:
        """Its checkpoint, without the data's position."""
        states = {"optimizer": self.optimizers.state_dict(), "lr_scheduler": self.schedule.state_dict()}
        return flatten_state_dict(ModelWrapper(self.model).state_dict() | states | {"train_state": self.progress.state_dict()})[0]


class TrainState(SimpleNamespace):
    """The part of torchtitan's trainer that is saved (torchtitan/train.py)."""

    step, ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def kind(entry: Any) -> tuple:
    """Shape and type of a checkpoint's entry, from the tensor itself or the checkpoint's metadata."""
    if isinstance(entry, Tensor):
        return tuple(entry.shape), entry.dtype
    return (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "properties") else ("object",)


@pytest.mark.parametrize("name", ["deepseek on dp_shard4, ep2", "qwen3 on tp2 x dp_shard2, ep4", "qwen3_tied on tp2"])
def test_keys_are_torchtitans(straight, corpus, name) -> None:
    folder, (end, *_) = straight(name)
    saved = dcp.FileSystemReader(folder / "checkpoint" / "step-3").read_metadata().state_dict_metadata
    expected = Torchtitan(SAVED[name][1], corpus, folder).flat()
    assert expected.keys() <= saved.keys()
    assert {key: kind(saved[key]) for key in expected} == {key: kind(value) for key, value in expected.items()}
    ours = saved.keys() - expected.keys()
    placed = {"deepseek": ["layers.1"], "qwen3": ["layers.0", "layers.1"]}.get(SAVED[name][1], [])
    ours -= {f"expert_placement.{layer}" for layer in placed}
    assert ours == {"dataloader.position", "dataloader.corpus", *(f"rng.rank_{rank}.cpu" for rank in range(SAVED[name][0]))}


@pytest.mark.parametrize("name", ["deepseek on dp_shard4, ep2", "qwen3 on tp2 x dp_shard2, ep4", "qwen3_tied on tp2"])
def test_torchtitan_and_back(pool, straight, corpus, tmp_path, name) -> None:
    """torchtitan loads a checkpoint of ours whole, and ours loads what torchtitan then saves."""
    folder, ranks = straight(name)
    end, model = ranks[0], SAVED[name][1]
    peer = Torchtitan(model, corpus, folder)
    assert peer.manager.load(step=6)
    parameters = {key: p.detach().numpy() for key, p in peer.model.named_parameters()}
    assert_equal(parameters, end["parameters"])
    assert_equal({key: b.numpy() for key, b in peer.model.named_buffers() if key.endswith("expert_bias")}, end["bias"])
    moments = peer.optimizers.state_dict()
    assert_equal({key: moments[f"state.{key}"].numpy() for key in end["moments"]}, end["moments"])
    assert {moments[f"state.{key}.step"].item() for key in parameters} == {6}
    assert (peer.progress.step, peer.progress.ntokens_seen, peer.schedule.schedulers[0].last_epoch) == end["progress"]

    back = Torchtitan(model, corpus, tmp_path)
    set_model_state_dict(back.model, get_model_state_dict(peer.model))
    back.optimizers.load_state_dict(moments)
    back.schedule.load_state_dict(peer.schedule.state_dict())
    back.progress.load_state_dict(peer.progress.state_dict())
    back.manager.save(6)
    start, _ = run_one(pool, corpus, tmp_path, MODELS[model], {"checkpoint.exclude_from_loading": "dataloader"})
    for key in ("parameters", "bias", "progress"):
        assert_equal(start[key], end[key], key)


def test_torchtitan_finds_its_settings(straight, corpus) -> None:
    """It takes the optimizer's settings, and with them the learning rate of the next step, from the checkpoint."""
    name = "qwen3 on tp2 x dp_shard2, ep4"
    folder, _ = straight(name)
    peer = Torchtitan(SAVED[name][1], corpus, folder)
    adam = peer.optimizers.optimizers[0]
    before = {key: value for key, value in adam.param_groups[0].items() if key != "params"}
    peer.manager.load(step=3)
    after = {key: value for key, value in adam.param_groups[0].items() if key != "params"}
    assert after == before | {"lr": records(folder)[3]["lr"]}
    assert peer.schedule.schedulers[0].get_last_lr() == [records(folder)[3]["lr"]]


def test_oldest_are_removed_and_incomplete_ones_ignored(pool, corpus, tmp_path) -> None:
    half = tmp_path / "checkpoint" / "step-9"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"cut off")
    settings = {"checkpoint.interval": 1, "checkpoint.keep_latest_k": 2, "training.steps": 4}
    start, end = run_one(pool, corpus, tmp_path, MODELS["deepseek"], settings)
    assert start["progress"] == (0, 0, 0)
    assert complete_steps(tmp_path / "checkpoint") == {3, 4}
    assert not (tmp_path / "checkpoint" / "step-2").exists()
    assert half.exists()

    start, _ = run_one(pool, corpus, tmp_path, MODELS["deepseek"], settings, {"checkpoint.load_step": 3})
    assert start["progress"][0] == 3
    start, again = run_one(pool, corpus, tmp_path, MODELS["deepseek"], settings)
    assert start["progress"][0] == 4
    assert_equal(again, end)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]


def test_going_back_sets_the_later_steps_aside(pool, corpus, tmp_path) -> None:
    """The branch that was left neither crowds out the new one's checkpoints nor counts as its newest."""
    settings = {"training.steps": 6, "checkpoint.interval": 2, "checkpoint.last_save_model_only": False}
    run_one(pool, corpus, tmp_path, MODELS["deepseek"], settings | {"checkpoint.keep_latest_k": 0})
    back = settings | {"training.steps": 4, "checkpoint.load_step": 2, "checkpoint.keep_latest_k": 2}
    run_one(pool, corpus, tmp_path, MODELS["deepseek"], back)
    assert complete_steps(tmp_path / "checkpoint") == {2, 4}
    assert (tmp_path / "checkpoint" / "abandoned-6" / ".metadata").exists()
    start, _ = run_one(pool, corpus, tmp_path, MODELS["deepseek"], settings)
    assert start["progress"][0] == 4


def test_another_seed_is_refused(pool, straight, corpus, tmp_path) -> None:
    """The position in the data would be one in another order."""
    folder, _ = straight("deepseek on 1")
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], {"debug.seed": 7, "checkpoint.load_step": 3})
    code, error, _ = pool.run(1, trainer_runs.main, argv, group=False)[0]
    assert code == 2
    assert (
        "debug.seed = 7: the position in the data is of a run with" in error and 'exclude_from_loading = ["dataloader"]' in error
    )


def test_a_step_saved_again_stays_until_the_new_one_is_whole(pool, corpus, tmp_path, straight) -> None:
    """A crash while step-6 is written again leaves the older step-6 and no mixture of both."""
    folder, _ = straight("deepseek on 1")
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    before = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint" / "step-6").iterdir()}
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], WHOLE_RUN, {"checkpoint.load_step": 3})
    assert pool.run(1, trainer_runs.crash_while_saving, argv, group=False) == ["crashed"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "checkpoint" / "step-6").iterdir()} == before
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-3", "step-6"]


def test_starting_from_a_model(pool, straight, corpus, tmp_path) -> None:
    folder, (end, *_) = straight("deepseek on 1")
    path = {"checkpoint.initial_load_path": folder / "checkpoint" / "step-6", "training.steps": 2}
    start, _ = run_one(pool, corpus, tmp_path / "model", MODELS["deepseek"], path)
    assert_equal(start["parameters"], end["parameters"])
    assert_equal(start["bias"], end["bias"])
    assert start["progress"] == (0, 0, 0)
    assert not any(moment.any() for moment in start["moments"].values())
    assert set(start["counts"].values()) == {0}

    whole = path | {"checkpoint.initial_load_model_only": False, "training.steps": 6}
    start, _ = run_one(pool, corpus, tmp_path / "whole", MODELS["deepseek"], whole)
    assert_equal(start, end)


def test_leaving_parts_out(pool, straight, corpus, tmp_path) -> None:
    folder, (end, *_) = straight("deepseek on 1")
    path = {"checkpoint.initial_load_path": folder / "checkpoint" / "step-3", "checkpoint.initial_load_model_only": False}
    excluded = {"checkpoint.exclude_from_loading": "optimizer,lr_scheduler,dataloader", "training.steps": 5}
    start, _ = run_one(pool, corpus, tmp_path, MODELS["deepseek"], WHOLE_RUN, path, excluded)
    assert start["progress"] == (3, 3 * 12 * 24, 0)
    assert not any(moment.any() for moment in start["moments"].values())
    assert set(start["counts"].values()) == {0}
    assert not start["position"][:, 2].any()
    assert [record["step"] for record in records(tmp_path)] == [4, 5]
    assert [record["lr"] for record in records(tmp_path)] == [record["lr"] for record in records(folder)[:2]]


def test_export(pool, straight, corpus, tmp_path) -> None:
    _, (end, *_) = straight("deepseek on 1")
    export = {"checkpoint.last_save_model_only": True, "checkpoint.export_dtype": "bfloat16"}
    run_one(pool, corpus, tmp_path, MODELS["deepseek"], WHOLE_RUN, export)
    path = tmp_path / "checkpoint" / "step-6"
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {key: kind(entry)[1] for key, entry in saved.items()} == {
        **dict.fromkeys(end["parameters"], torch.bfloat16),
        **dict.fromkeys(end["bias"], torch.float32),
    }
    new = {"checkpoint.initial_load_path": path, "training.steps": 2}
    start, _ = run_one(pool, corpus, tmp_path / "new", MODELS["deepseek"], new)
    assert_equal(
        start["parameters"],
        {key: torch.from_numpy(p).bfloat16().float().numpy() for key, p in end["parameters"].items()},
    )

    code, error, _ = pool.run(1, trainer_runs.main, arguments(corpus, tmp_path, MODELS["deepseek"]), group=False)[0]
    assert code == 2
    assert f"{path} holds a model alone" in error
    assert "checkpoint.initial_load_path" in error and "checkpoint.load_step" in error
    assert len(records(tmp_path)) == 6


@pytest.mark.parametrize(
    ("change", "model_only", "message"),
    [
        ({"model.overrides.n_layers": 3}, True, "  15 missing: layers.2.attention.kv_norm.weight, "),
        ({"model.overrides.n_layers": 3}, False, "  57 missing: layers.2.attention.kv_norm.weight, "),
        ({"model.overrides.n_layers": 1}, True, "  15 unexpected: layers.1.attention.kv_norm.weight, "),
        ({"model.overrides.n_layers": 1}, False, "  57 unexpected: layers.1.attention.kv_norm.weight, "),
        (
            {"model.overrides.moe_inter_dim": 32},
            True,
            "  6 of another shape: layers.1.moe.experts.w1 [6, 16, 24] (needed: [6, 32, 24]), ",
        ),
        (
            {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"},
            False,
            "  78 of another type: layers.0.attention.kv_norm.weight float32 (needed: bfloat16), ",
        ),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(pool, straight, corpus, tmp_path, change, model_only, message) -> None:
    path = straight("deepseek on 1")[0] / "checkpoint" / "step-3"
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], change)
    for error, before, after in pool.run(2, trainer_runs.refused_load, argv, path, model_only, group=False):
        assert message in error
        assert "model.overrides" in error and "training.dtype" in error
        assert_equal(after, before)


def test_another_global_batch_is_refused(pool, straight, corpus, tmp_path) -> None:
    folder, _ = straight("deepseek on 1")
    shutil.copytree(folder / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    argv = arguments(corpus, tmp_path, MODELS["deepseek"], {"training.global_batch_size": 6})
    code, error, _ = pool.run(1, trainer_runs.main, argv, group=False)[0]
    assert code == 2
    assert "training.global_batch_size = 6" in error and "set training.global_batch_size = 12" in error
    code, *_ = pool.run(1, trainer_runs.main, [*argv, "--checkpoint.exclude_from_loading=dataloader"], group=False)[0]
    assert code == 0


def test_other_data_is_refused(pool, tmp_path) -> None:
    """Where the streams of a batch stand says which document comes next, unless the corpus has another length."""
    few, more = (trainer_runs.write_corpus(tmp_path / str(number), number) for number in (5, 7))
    run_one(pool, few, tmp_path / "run", MODELS["deepseek"], {"training.steps": 2})
    [(code, error, _)] = pool.run(1, trainer_runs.main, arguments(more, tmp_path / "run", MODELS["deepseek"]), group=False)
    assert code == 2
    assert "does not fit a corpus of 7 documents" in error
