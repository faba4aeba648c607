"""Training on GPUs gives what the CPU gives: every layout of the GPUs at hand against one process in fp32."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_titan.data import MicroBatch
from moe_titan.engine import Engine, TrainOptions
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.parallelize import ParallelOptions

SEQ = 64
NAME, ARGS = tiny.qwen3(num_shared_experts=1)
# Multiples of 64, for the kernels of attention.
ARGS = replace(
    ARGS, vocab_size=64, max_seq_len=SEQ, head_dim=64, dim=128, n_heads=2, n_kv_heads=2, hidden_dim=128, moe_inter_dim=64
)
LAYOUTS = {
    1: [Layout()],
    2: [Layout(dp_shard=2), Layout(dp_shard=2, ep=2), Layout(tp=2), Layout(tp=2, ep=2)],
    4: [Layout(tp=2, dp_shard=2, ep=4), Layout(tp=2, dp_shard=2, ep=2, etp=2), Layout(dp_replicate=2, dp_shard=2, ep=2)],
    8: [
        *(Layout(tp=2, dp_shard=4, ep=ep, etp=etp) for ep, etp in ((8, 1), (4, 2), (2, 1))),
        *(Layout(dp_replicate=2, dp_shard=4, ep=ep) for ep in (4, 8)),
    ],
}
# Relative errors of loss and gradient norm.
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (2e-3, 1e-2)}


def train(
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    factor: float | None = None,
    mtp_layers: int = 0,
    moving: bool = False,
) -> list[tuple[float, float]]:
    """Loss, on further tokens too, and gradient norm of five steps on the same global batch."""
    engine, batches = build(layout, device, dtype, factor, mtp_layers)
    results = []
    for _ in range(5):
        results.append(engine.step(batches, lr=1e-3))
        if moving:
            engine.placement.rebalance(results[-1].expert_load)
    moved = [slots for slots in engine.placement.expert_of_slot.values() if slots != sorted(slots)]
    # A rank's only expert has nowhere to go.
    assert bool(moved) == (moving and 1 < layout.ep < ARGS.moe_args.num_experts)
    return [(result.loss + (result.mtp_loss or 0.0), result.grad_norm) for result in results]


def build(
    layout: Layout, device: torch.device, dtype: torch.dtype, factor: float | None = None, mtp_layers: int = 0
) -> tuple[Engine, list[MicroBatch]]:
    mesh = FoldedMesh(layout, device.type)
    options = ParallelOptions(param_dtype=dtype, dispatch_tokens=8 * SEQ, capacity_factor=factor)
    engine = Engine(NAME, ARGS, mesh, device, TrainOptions(mtp_layers=mtp_layers), options)
    return engine, tiny.share(tiny.global_batch(0, 8, seq=SEQ), mesh.data_rank, layout.dp, 1)


def train_without_waiting(layout: Layout, device: torch.device, mtp_layers: int) -> None:
    """Twenty steps in which the host must not wait for the device, after one that compiles kernels."""
    engine, batches = build(layout, device, torch.bfloat16, mtp_layers=mtp_layers)
    engine.step(batches, lr=1e-3).wait()
    pinned = [MicroBatch(*(each if each is None else each.pin_memory() for each in batch)) for batch in batches]
    torch.cuda.set_sync_debug_mode("error")
    results = [engine.step(pinned, lr=1e-3) for _ in range(20)]
    torch.cuda.set_sync_debug_mode("default")
    assert results[-1].loss < results[0].loss


def train_on_gpus(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    device, store, timeout = torch.device("cuda", rank), f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=world, timeout=timeout)
    runs = [[train(layout, device, dtype) for layout in LAYOUTS[world]] for dtype in BOUNDS]
    # Rows for a tenth of the tokens, so that every step is repeated.
    runs.append([train(layout, device, torch.bfloat16, factor=0.1) for layout in LAYOUTS[world]])
    runs.append([train(layout, device, torch.bfloat16, moving=True) for layout in LAYOUTS[world]])
    runs.append([train(layout, device, torch.bfloat16, mtp_layers=2) for layout in LAYOUTS[world]])
    for layout in LAYOUTS[world]:
        for mtp_layers in (0, 2):
            train_without_waiting(layout, device, mtp_layers)
    if rank == 0:
        Path(folder, "runs.json").write_text(json.dumps(runs))
    dist.destroy_process_group()


@pytest.mark.parametrize("gpus", [world for world in LAYOUTS if world <= torch.cuda.device_count()])
def test_gpus_train_as_one_process_on_the_cpu(pool, tmp_path, gpus) -> None:
    alone, further = (pool.run(1, train, Layout(), torch.device("cpu"), torch.float32, None, depths)[0] for depths in (0, 2))
    assert alone[-1][0] < alone[0][0] and further[-1][0] < further[0][0]
    mp.spawn(train_on_gpus, (gpus, str(tmp_path)), nprocs=gpus)
    bounds_of_runs = *BOUNDS.values(), *[BOUNDS[torch.bfloat16]] * 3
    expected_of_runs = *[alone] * 4, further
    found = json.loads((tmp_path / "runs.json").read_text())
    for runs, expected, bounds in zip(found, expected_of_runs, bounds_of_runs, strict=True):
        for layout, steps in zip(LAYOUTS[gpus], runs, strict=True):
            for (loss, norm), (wanted_loss, wanted_norm) in zip(steps, expected, strict=True):
                assert loss == pytest.approx(wanted_loss, rel=bounds[0]), layout
                assert norm == pytest.approx(wanted_norm, rel=bounds[1]), layout
