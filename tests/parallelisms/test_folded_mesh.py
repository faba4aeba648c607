"""Who is in which group, against a plain enumeration of the ranks."""

import itertools
import re

import pytest
import torch.distributed as dist

from parallelisms.folded_mesh import DENSE_DIMS, EXPERT_DIMS, FoldedMesh, Layout

# Of world 8, with the expert-data degrees (edp_replicate, edp_shard) that they must give.
LAYOUTS = [
    (Layout(dp_shard=8), (1, 8)),
    (Layout(dp_replicate=8), (8, 1)),
    (Layout(tp=8, ep=8), (1, 1)),
    (Layout(dp_shard=4, tp=2, ep=8), (1, 1)),
    (Layout(dp_shard=4, tp=2, ep=2), (1, 4)),
    (Layout(dp_shard=4, tp=2, ep=4, etp=2), (1, 1)),
    (Layout(dp_shard=2, tp=4, ep=2, etp=2), (1, 2)),
    (Layout(dp_shard=2, tp=4, etp=8), (1, 1)),
    (Layout(dp_replicate=2, dp_shard=4), (2, 4)),
    (Layout(dp_replicate=2, dp_shard=4, ep=2), (2, 2)),
    (Layout(dp_replicate=2, dp_shard=4, ep=4), (2, 1)),
    (Layout(dp_replicate=2, dp_shard=4, ep=8), (1, 1)),
    (Layout(dp_replicate=4, dp_shard=2, ep=4), (2, 1)),
    (Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2), (2, 1)),
    (Layout(dp_replicate=2, cp=2, tp=2, ep=4), (2, 1)),
    (Layout(dp_shard=2, cp=2, tp=2, ep=2), (1, 4)),
    (Layout(pp=2, dp_shard=2, tp=2, ep=2), (1, 2)),
    (Layout(pp=2, dp_replicate=2, tp=2, ep=4), (1, 1)),
    (Layout(pp=4, tp=2, etp=2), (1, 1)),
]


def digits(rank: int, sizes: list[int]) -> tuple[int, ...]:
    """A rank in mixed radix, the last dimension varying fastest."""
    return list(itertools.product(*map(range, sizes)))[rank]


def peers(rank: int, dims: tuple[str, ...], sizes: list[int], varying: set[str]) -> list[int]:
    """The ranks that differ from this one in the varying dimensions alone."""
    fixed = [i for i, dim in enumerate(dims) if dim not in varying]
    own = digits(rank, sizes)
    return [r for r in range(8) if all(digits(r, sizes)[i] == own[i] for i in fixed)]


def members(group) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _describe() -> list[dict]:
    described = []
    for layout, _ in LAYOUTS:
        mesh = FoldedMesh(layout, "cpu")
        one_dimensional = {dim: members(mesh.group(dim)) for dim in (*DENSE_DIMS, *EXPERT_DIMS[1:])}
        described.append(
            one_dimensional
            | {dim + "_at": mesh.coordinate(dim) for dim in one_dimensional}
            | {
                "dispatch": members(mesh.dispatch_group),
                "stage": members(mesh.stage_group),
                "data": members(mesh.data_group),
                "data_rank": mesh.data_rank,
                "dense_data": sorted(mesh.dense_data.mesh.flatten().tolist()),
                "expert_data": sorted(mesh.expert_data.mesh.flatten().tolist()),
                "data_dims": (mesh.dense_data.ndim, mesh.expert_data.ndim),
                "again": members(mesh.dispatch_group),
            }
        )
    return described


@pytest.fixture(scope="module")
def described(pool) -> list[list[dict]]:
    return pool.run(8, _describe)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda i: str(LAYOUTS[i][0]))
def test_groups(described, index) -> None:
    layout, (edp_replicate, edp_shard) = LAYOUTS[index]
    assert (layout.edp_replicate, layout.edp_shard) == (edp_replicate, edp_shard)
    dense = [layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp]
    expert = [layout.pp, edp_replicate, edp_shard, layout.ep, layout.etp]
    for rank, ranks in enumerate(described):
        actual = ranks[index]

        def group(dims, sizes, *varying, rank=rank):
            ranks = peers(rank, dims, sizes, set(varying))
            return ranks if len(ranks) > 1 else None

        for dims, sizes in ((DENSE_DIMS, dense), (EXPERT_DIMS, expert)):
            for dim, at in zip(dims, digits(rank, sizes), strict=True):
                assert actual[dim] == group(dims, sizes, dim), dim
                assert actual[dim + "_at"] == at, dim
        assert actual["dispatch"] == actual["again"] == group(EXPERT_DIMS, expert, "ep", "etp")
        assert actual["stage"] == group(DENSE_DIMS, dense, *DENSE_DIMS[1:])
        assert actual["data"] == group(DENSE_DIMS, dense, "dp_replicate", "dp_shard")
        assert actual["dense_data"] == peers(rank, DENSE_DIMS, dense, {"dp_replicate", "dp_shard"})
        assert actual["expert_data"] == peers(rank, EXPERT_DIMS, expert, {"edp_replicate", "edp_shard"})
        assert actual["data_dims"] == (1 + (layout.dp_replicate > 1), 1 + (edp_replicate > 1))
        _, replicate, shard, _, _ = digits(rank, dense)
        assert actual["data_rank"] == replicate * layout.dp_shard + shard
        # Ranks that together hold one copy of the experts' shards lie within a dense replica, or span whole ones.
        copy = peers(rank, EXPERT_DIMS, expert, {"edp_shard", "ep", "etp"})
        replica = peers(rank, DENSE_DIMS, dense, {"dp_shard", "cp", "tp"})
        assert set(copy) <= set(replica) or set(copy) >= set(replica)


@pytest.mark.parametrize("degrees", [{"ep": 3}, {"ep": 4, "etp": 4}, {"ep": 16}], ids=str)
def test_expert_degrees_that_do_not_fit(degrees) -> None:
    layout = {"dp_shard": 4, "tp": 2} | degrees
    product = re.escape(f"ep * etp = {layout['ep']} * {layout.get('etp', 1)}")
    with pytest.raises(ValueError, match=f"{product} does not divide the 8 ranks.*choose ep and etp whose product divides 8"):
        Layout(**layout)


def test_expert_degrees_stay_within_a_pipeline_stage() -> None:
    with pytest.raises(ValueError, match="does not divide the 4 ranks of a pipeline stage"):
        Layout(pp=2, dp_shard=4, ep=8)


def _wrong_world() -> None:
    FoldedMesh(Layout(dp_shard=4), "cpu")


def test_world_of_another_size(pool) -> None:
    with pytest.raises(AssertionError, match=r"needs 4 ranks, but 2 are running; start that many or change"):
        pool.run(2, _wrong_world)
