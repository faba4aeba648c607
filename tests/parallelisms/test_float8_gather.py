"""Weights gathered in FP8 give the bits of those gathered in bf16; on the CPU by the kernels' references."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import tiny
import torch
from layout_runs import CLIPPED, assert_same_run, train
from workers import WorkerError

from float8.all_gather import TensorGather, TileGather
from float8.convert import Float8Options
from kernels.quantize import quantize_weights
from moe_titan.engine import Engine
from parallelisms.folded_mesh import Layout

BFLOAT16 = {"param_dtype": torch.bfloat16}
LINEARS, EXPERTS = Float8Options("tensorwise"), Float8Options("tensorwise", "blockwise")


def qwen3(width: int) -> tuple:
    name, args = tiny.qwen3(num_shared_experts=1)
    return name, replace(args, dim=width, head_dim=16, moe_inter_dim=width)


def _train(model, layout, options, parallel) -> dict:
    gathered = []

    def note(engine: Engine) -> None:
        gathered.extend(name for name, what in engine.conversion.converted.items() if what.endswith("gathered in FP8"))

    arrived = Counter()
    with ExitStack() as stack:
        for kind in (TensorGather, TileGather):
            stack.enter_context(patch.object(kind, "fsdp_post_all_gather", counted(kind.fsdp_post_all_gather, arrived)))
        run = train(model, layout, replace(CLIPPED, float8=options), samples=12, tweak=note, **BFLOAT16, **parallel)
    return run | {"gathered": gathered, "arrived": arrived}


def counted(post, arrived: Counter):
    def fsdp_post_all_gather(self, gathered, *rest, **options):
        arrived[type(self).__name__] += 1
        assert gathered[0].dtype == torch.uint8
        return post(self, gathered, *rest, **options)

    return fsdp_post_all_gather


@pytest.mark.parametrize(
    ("options", "layout", "parallel"),
    [
        (LINEARS, Layout(dp_shard=2, ep=2), {"compile_backend": "aot_eager"}),
        (LINEARS, Layout(dp_shard=2, tp=2), {"reshard_after_forward": False}),
        (LINEARS, Layout(dp_shard=2, dp_replicate=2), {"recompute": "selective"}),
        (EXPERTS, Layout(dp_shard=4, ep=2), {"recompute": "full"}),
    ],
    ids=["compiled", "tensor_parallel", "replicas", "experts"],
)
def test_same_bits(pool, options, layout, parallel) -> None:
    model = qwen3(128 if options is EXPERTS else 32)
    expected, actual = (
        pool.run(layout.world, _train, model, layout, replace(options, all_gather=on), parallel)[0] for on in (False, True)
    )
    assert not expected["gathered"] and not expected["arrived"]
    parts = {name.split(".")[2] for name in actual["gathered"]}
    assert parts == {"attention", "moe"}
    assert ("layers.0.moe.experts" in actual["gathered"]) == (options is EXPERTS)
    # Three steps, forward and mostly again backward, of every weight.
    assert actual["arrived"]["TensorGather"] >= 3 * len([name for name in actual["gathered"] if "moe.experts" not in name])
    assert actual["arrived"]["TileGather"] >= 3 * 2 * len([name for name in actual["gathered"] if "moe.experts" in name])
    assert_same_run(actual, expected, 0.0)


def test_blockwise_linear_layers_are_left(pool) -> None:
    """Each of their operands is quantised where it is used."""
    options = Float8Options("blockwise", "blockwise", all_gather=True)
    run = pool.run(4, _train, qwen3(128), Layout(dp_shard=4, ep=2), options, {})[0]
    assert run["gathered"] and all(name.endswith("moe.experts") for name in run["gathered"])


def test_nothing_to_gather(pool) -> None:
    """Experts of which each rank has its own."""
    options = Float8Options(expert_recipe="blockwise", all_gather=True)
    with pytest.raises(WorkerError, match="NothingToGather: gathers nothing"):
        pool.run(2, _train, qwen3(128), Layout(dp_shard=2, ep=2), options, {})


def test_a_gathered_weight_does_nothing_but_change_its_shape() -> None:
    w_E2FD = torch.randn(2, 2, 128, 256).bfloat16()
    weight = TileGather(w_E2FD).fsdp_post_all_gather(TileGather(w_E2FD).fsdp_pre_all_gather(None)[0], None, torch.bfloat16)[0]
    assert weight.dtype == torch.bfloat16 and weight.view(2, 2, 128, 256).flatten(1, 2).shape == (2, 256, 256)
    for transposed in (False, True):
        expected = quantize_weights(w_E2FD.flatten(1, 2), True, transposed)
        for part, other in zip(weight.operand(transposed), expected, strict=True):
            assert torch.equal(part.float(), other.float()) and part.is_contiguous()
    with pytest.raises(NotImplementedError, match="aten.mul.Tensor of a weight that was gathered in FP8"):
        weight * 2
