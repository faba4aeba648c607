"""Moving experts between ranks: what is chosen, that all of an expert moves, and that training does not notice."""

import itertools
import random

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from layout_runs import CLIPPED, biases, full, full_parameters, relative_error

from moe_titan.layers.expert_placement import even_slots
from parallelisms.folded_mesh import Layout
from parallelisms.routing import Placement
from parallelisms.sharding_plan import logical_tensors


def rank_loads(slots: list[int], loads: list[int], ranks: int) -> list[int]:
    per_rank = len(slots) // ranks
    return [sum(loads[expert] for expert in slots[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("experts", [8, 64, 128])
def test_loads_become_even(ranks, experts) -> None:
    rng = random.Random(experts + ranks)
    loads = [int(1000 * rng.lognormvariate(0, 0.7)) for _ in range(experts)]
    start = rng.sample(range(experts), experts)
    slots = even_slots(start, loads, ranks)
    assert sorted(slots) == list(range(experts))
    before, after = (rank_loads(each, loads, ranks) for each in (start, slots))
    assert max(after) <= max(before)
    if experts >= 16 * ranks:
        assert max(after) <= 1.03 * sum(loads) / ranks
    assert even_slots(slots, loads, ranks) == slots


@pytest.mark.parametrize("loads", [[5] * 8, [0] * 8, [7, 0, 0, 0, 7, 0, 0, 0]], ids=str)
def test_even_loads_move_nothing(loads) -> None:
    assert even_slots(list(range(8)), loads, 2) == list(range(8))


def test_smallest_cases_against_all_placements() -> None:
    rng = random.Random(0)
    for _ in range(50):
        loads = [rng.randrange(100) for _ in range(6)]
        best = min(max(rank_loads(list(p), loads, 2)) for p in itertools.permutations(range(6)))
        assert max(rank_loads(even_slots(list(range(6)), loads, 2), loads, 2)) <= max(1.25 * best, 1.02 * sum(loads) / 2)


def test_routing_by_slots() -> None:
    placement = Placement.of([2, 0, 3, 1], torch.device("cpu"))
    assert placement.slot_E1.tolist() == [1, 3, 0, 2, 4]
    assert placement.slot_E1[placement.expert_E].tolist() == [0, 1, 2, 3]


def _everything(engine) -> dict[str, np.ndarray]:
    with engine.placement.by_number():
        moments = {
            f"{logical} {moment}": full(part)
            for name, moment, tensor in engine.optimizer.moments()
            for logical, part in logical_tensors(name, tensor)
        }
        return full_parameters(engine) | biases(engine) | moments


def _there_and_back(layout: Layout, dtype: torch.dtype) -> list[bool]:
    """Random placements one after the other: whether all of an expert is where it should be, and comes back bit for bit."""
    engine = tiny.build(tiny.qwen3(), layout, param_dtype=dtype)
    for batch in (tiny.global_batch(step, 4 * layout.dp) for step in range(2)):
        engine.step(tiny.share(batch, engine.mesh.data_rank, layout.dp, 1), lr=1e-2).wait()
    placement, name = engine.placement, "layers.1.moe.experts.w2"
    before, ours = _everything(engine), [tensor.clone() for tensor in engine.optimizer.tensors(name)]
    everyone = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    e, shards = 8 // layout.ep, layout.edp_shard
    holders = dist.get_process_group_ranks(engine.mesh.expert_shard_group)  # ep varies fastest
    ordered = [holders[shard * layout.ep + rank] for rank in range(layout.ep) for shard in range(shards)]
    by_expert = [torch.cat([everyone[rank][i] for rank in ordered]) for i in range(len(ours))]
    rng, results = random.Random(3), []
    for _ in range(3):
        slots = rng.sample(range(8), 8)
        placement.expert_of_slot["layers.1"] = slots
        with placement.by_number():
            results.append(all(map(torch.equal, engine.optimizer.tensors(name), ours)))
        of_rank = slots[engine.mesh.coordinate("ep") * e :][:e]
        mine = [part.tolist() for part in torch.tensor(of_rank).chunk(shards)][engine.mesh.coordinate("edp_shard")]
        results += [torch.equal(now, whole[mine]) for now, whole in zip(engine.optimizer.tensors(name), by_expert, strict=True)]
    after = _everything(engine)
    return results + [np.array_equal(before[key], after[key]) for key in before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, tp=2, ep=4),
        Layout(dp_shard=2, ep=2),
        Layout(tp=2, dp_shard=2, ep=2, etp=2),
        Layout(dp_shard=4, ep=2),
        Layout(dp_replicate=2, dp_shard=2, ep=2),
    ],
    ids=str,
)
def test_all_of_an_expert_moves(pool, layout, dtype) -> None:
    for results in pool.run(layout.world, _there_and_back, layout, dtype):
        assert len(results) > 12 and all(results)


def _train(layout: Layout, dispatcher: str, moving: bool) -> tuple[dict, list[float], bool, float]:
    """Five steps, after each of which experts move or do not; and by how much the last placement evens its loads."""
    options = {"dispatcher": dispatcher, "dispatch_tokens": 12 * tiny.SEQ, "dispatch_sms": 2}
    engine = tiny.build(tiny.qwen3(), layout, CLIPPED, **options)
    losses, even = [], 0.0
    for step in range(5):
        batch = tiny.padded_batch(step, 12)
        result = engine.step(tiny.share(batch, engine.mesh.data_rank, layout.dp, 1), lr=1e-3)
        losses += [result.loss, engine.evaluate(tiny.share(batch, engine.mesh.data_rank, layout.dp, 1))]
        if moving:
            engine.placement.rebalance(result.expert_load)
            for layer, slots in engine.placement.expert_of_slot.items():
                load = result.expert_load[layer].tolist()
                even += max(rank_loads(sorted(slots), load, layout.ep)) - max(rank_loads(slots, load, layout.ep))
    moved = any(slots != sorted(slots) for slots in engine.placement.expert_of_slot.values())
    return _everything(engine), losses, moved, even


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [
        (Layout(dp_shard=2, tp=2, ep=4), "nvlink"),
        (Layout(dp_shard=2, tp=2, ep=4), "alltoall"),
        (Layout(dp_shard=2, ep=2), "allgather"),
        (Layout(dp_replicate=2, tp=2, ep=2, etp=2), "alltoall"),
        (Layout(dp_replicate=2, dp_shard=2, ep=2), "alltoall"),
        (Layout(dp_shard=4, ep=2), "alltoall"),
        (Layout(dp_shard=8, ep=2), "alltoall"),  # one expert on each rank
        (Layout(dp_shard=8, ep=4), "nvlink"),
    ],
    ids=str,
)
def test_training_does_not_notice(pool, layout, dispatcher) -> None:
    still = pool.run(layout.world, _train, layout, dispatcher, False)[0]
    moving = pool.run(layout.world, _train, layout, dispatcher, True)[0]
    assert moving[2] and not still[2] and moving[3] > 0
    assert moving[1] == pytest.approx(still[1], rel=1e-5)
    errors = {name: relative_error(moving[0][name], value) for name, value in still[0].items()}
    assert max(errors.values()) <= 1e-5, errors


def _one_rank() -> bool:
    engine = tiny.build(tiny.qwen3(), Layout())
    result = engine.step([tiny.global_batch(0, 4)], lr=1e-3)
    engine.placement.rebalance(result.expert_load)
    return all(slots == sorted(slots) for slots in engine.placement.expert_of_slot.values())


def test_one_rank_moves_nothing(pool) -> None:
    assert pool.run(1, _one_rank)[0]
