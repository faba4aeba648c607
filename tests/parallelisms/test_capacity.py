"""Bounded rows: what does not fit is noticed, and the step and the evaluation are repeated with room for all."""

import pytest
import tiny
import torch
from layout_runs import CLIPPED, assert_bitwise_replicas, assert_same_run, train

from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.folded_mesh import Layout

SAMPLES, STEPS = 12, 2
FOLDED = Layout(dp_shard=2, tp=2, ep=2, etp=2)


def _options(layout: Layout, factor: float | None, stash_factor: float | None = None) -> dict:
    sequences = SAMPLES // layout.dp // 2  # two micro-batches
    bounds = {"dispatch_tokens": sequences * tiny.SEQ // layout.tp, "dispatch_sms": 3, "capacity_factor": factor}
    bounds["stash_factor"] = stash_factor
    return bounds | {"dispatcher": "auto" if layout.ep == 1 else "nvlink"}


def _train(
    layout: Layout,
    factor: float | None,
    recompute: str = "none",
    dispatcher: str | None = None,
    stash_factor: float | None = None,
    domain: int | None = None,
) -> dict:
    passes = []

    def count(engine) -> None:
        run = engine._train_on
        engine._train_on = lambda *args: passes.append(args) or run(*args)

    options = _options(layout, factor, stash_factor) | {"recompute": recompute, "dispatch_domain": domain}
    if dispatcher is not None:
        options["dispatcher"] = dispatcher
    batch = SAMPLES // layout.dp // 2
    run = train(tiny.qwen3(), layout, CLIPPED, STEPS, SAMPLES, batch, tiny.padded_batch, tweak=count, **options)
    return run | {"passes": len(passes)}


@pytest.fixture(scope="module")
def single_process(pool):
    return pool.run(1, _train, Layout(), None)[0]


# Of two expert ranks, neither can get more than twice its share.
@pytest.mark.parametrize(
    ("layout", "factor", "recompute", "repeated"),
    [
        (Layout(dp_shard=2, ep=2), 0.5, "none", True),
        (Layout(dp_shard=2, ep=2), 1.8, "none", False),
        (Layout(dp_shard=2, ep=2), 2.0, "none", False),
        (FOLDED, 0.01, "full", True),
    ],
    ids=str,
)
def test_no_token_is_lost(pool, single_process, layout, factor, recompute, repeated) -> None:
    ranks = pool.run(layout.world, _train, layout, factor, recompute)
    assert [run["passes"] for run in ranks] == [STEPS * (1 + repeated)] * layout.world
    assert_same_run(ranks[0], single_process)
    assert_bitwise_replicas(ranks)


# Experts keep rows of all layers in one block: no rank can get more than twice its share of them either.
@pytest.mark.parametrize(
    ("layout", "factor", "stash_factor", "repeated"),
    [
        (Layout(dp_shard=2, ep=2), None, 2.0, False),
        (Layout(dp_shard=2, ep=2), None, 0.5, True),
        (Layout(dp_shard=2, ep=2), 1.9, 1.9, False),
        (FOLDED, None, 2.0, False),
        (FOLDED, None, 0.01, True),
    ],
    ids=str,
)
def test_stashed_rows(pool, single_process, layout, factor, stash_factor, repeated) -> None:
    ranks = pool.run(layout.world, _train, layout, factor, "none", None, stash_factor)
    assert [run["passes"] for run in ranks] == [STEPS * (1 + repeated)] * layout.world
    assert_same_run(ranks[0], single_process)
    assert_bitwise_replicas(ranks)


@pytest.mark.parametrize(("factor", "stash_factor", "repeated"), [(None, 4.0, False), (None, 0.5, True), (0.5, 4.0, True)])
def test_bounds_of_two_domains(pool, single_process, factor, stash_factor, repeated) -> None:
    """Of four expert ranks, none can get more than four times its share."""
    ranks = pool.run(4, _train, Layout(dp_shard=2, tp=2, ep=4), factor, "none", "nvlink", stash_factor, 2)
    assert [run["passes"] for run in ranks] == [STEPS * (1 + repeated)] * 4
    assert_same_run(ranks[0], single_process)
    assert_bitwise_replicas(ranks)


def _kept(stash_factor: float | None) -> tuple[int, int]:
    """Bytes of pre-activations that are saved for backward, and those of the stash."""
    layout, saved = Layout(dp_shard=2, ep=2), []
    engine = tiny.build(tiny.qwen3(), layout, CLIPPED, **_options(layout, None, stash_factor))
    batch = tiny.share(tiny.global_batch(0, SAMPLES), engine.mesh.data_rank, layout.dp, 2)[0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[1:] == (2, 16):
            saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.step([batch], lr=1e-3).wait()
    return sum(saved), 0 if engine.stash is None else engine.stash._block.nbytes


def test_a_stash_takes_the_place_of_each_layers_room(pool) -> None:
    tokens, row_bytes, layers = SAMPLES // 2 // 2 * tiny.SEQ * 2, 2 * 16 * 4, 2  # of both ranks; gate and up in fp32
    assert pool.run(2, _kept, None)[0] == (layers * tokens * 2 * row_bytes, 0)
    assert pool.run(2, _kept, 1.5)[0] == (0, layers * tokens * 3 // 2 * row_bytes)


def test_alltoall_has_room_for_all_anyway(pool, single_process) -> None:
    ranks = pool.run(2, _train, Layout(dp_shard=2, ep=2), 0.01, "none", "auto")
    assert [run["passes"] for run in ranks] == [STEPS] * 2
    assert_same_run(ranks[0], single_process)


def _evaluate(layout: Layout, factor: float | None) -> list[float]:
    engine = tiny.build(tiny.qwen3(), layout, CLIPPED, **_options(layout, factor))
    batches = tiny.share(tiny.global_batch(0, SAMPLES), engine.mesh.data_rank, layout.dp, 2)
    return [engine.evaluate(batches), engine.step(batches, lr=1e-3).loss]


def test_evaluation_loses_none_either(pool) -> None:
    layout = Layout(dp_shard=2, ep=2)
    bounded, unbounded = (pool.run(2, _evaluate, layout, factor)[0] for factor in (0.3, None))
    assert bounded == unbounded


def _one_rank_exceeds() -> list:
    rank = torch.distributed.get_rank()
    capacity = RowCapacity(1.5, torch.device("cpu"))
    found = [capacity.rows(5, 100), capacity.rows(5, 6), bool(capacity.take_exceeded())]
    row_P, offsets_e = torch.tensor([7, -1, 8, 0]), torch.tensor([4, 8 + rank], dtype=torch.int32)
    kept_P, ends_e = capacity.cut(row_P, offsets_e, 8)
    assert kept_P.tolist() == [7, -1, -1, 0] and ends_e.tolist() == [4, 8] and ends_e.dtype == torch.int32
    with capacity.lifted():
        found += [capacity.rows(5, 100), capacity.take_exceeded()]
    return [*found, bool(capacity.take_exceeded()), bool(capacity.take_exceeded()), capacity.rows(5, 100)]


def test_every_rank_learns_of_it_once(pool) -> None:
    assert pool.run(2, _one_rank_exceeds) == [[8, 6, False, 100, None, True, False, 8]] * 2
