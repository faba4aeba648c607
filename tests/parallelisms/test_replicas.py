"""Gradients of routers, summed over the data ranks."""

import pytest
import tiny
import torch.distributed as dist
from layout_runs import relative_error

from moe_titan.optimizer import ShardedAdamW
from parallelisms.folded_mesh import Layout
from parallelisms.replicas import sum_replicas
from parallelisms.sharding_plan import local


def _errors(layout: Layout, lacking: int) -> list[float]:
    """Of each router's gradient, where data rank ``lacking`` has none of the first layer's."""
    engine = tiny.build(tiny.qwen3(), layout)
    batches = tiny.share(tiny.global_batch(0, 8), engine.mesh.data_rank, layout.dp, 2)
    engine.optimizer.expect(len(batches))
    engine._train_on(batches, engine.count_trained(batches))
    names = [name for name in engine.optimizer.parameters if ".router." in name]
    routers = [engine.optimizer.parameters[name] for name in names]
    assert all(engine.plan[name].replicated for name in names) and len(engine._replicas) == len(routers) == 2
    found = [local(router.grad).clone() for router in routers]
    if engine.mesh.data_rank == lacking:
        routers[0].grad = None
        found[0].zero_()
    for grad in found:
        dist.all_reduce(grad)  # over tensor-parallel ranks, too
    sum_replicas(engine._replicas, engine.mesh.data_group)
    return [
        relative_error(ShardedAdamW._gradient(router).numpy(), grad.numpy()) for router, grad in zip(routers, found, strict=True)
    ]


@pytest.mark.parametrize("lacking", [-1, 1])
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)], ids=str)
def test_a_router_without_gradient_counts_as_zero(pool, layout, lacking) -> None:
    for errors in pool.run(layout.world, _errors, layout, lacking):
        assert max(errors) < 1e-6
