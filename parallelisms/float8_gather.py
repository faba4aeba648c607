"""Which weights FSDP2 gathers in FP8."""

from torch import nn
from torch.distributed.tensor import DTensor

from float8.all_gather import Scales, TensorGather, TileGather
from float8.convert import Conversion
from parallelisms.sharding_plan import PlanRow, ShardingPlan

SERVABLE = {"linears": "tensorwise", "experts": "blockwise"}
"""The recipes whose scales are the same in both directions, so that one copy of a weight serves."""


class NothingToGather(ValueError):
    """No weight can be gathered in FP8; the message says why."""


def gather_in_float8(model: nn.Module, plan: ShardingPlan, conversion: Conversion) -> Scales | None:
    """Has FSDP2 gather in FP8 the weights whose products all read the same elements, and notes it in ``conversion``.

    Left as they are: weights that are not cut over data ranks, or not evenly along their first dimension, where whole tiles end.

    Args:
        model: parallelised and initialised, and not used yet.
    Returns:
        Scales to update before weights are used that have changed; None where no weight has a scale of its own.
    Raises:
        NothingToGather: there is no such weight.
    """
    gathers: dict[str, list[TileGather | TensorGather]] = {}
    for name, recipe in conversion.converted.items():
        module = model.get_submodule(name)
        weights = dict(module.named_parameters(recurse=False))
        part = "linears" if isinstance(module, nn.Linear) else "experts"
        if recipe == SERVABLE[part] and all(_evenly_cut(weight, plan[f"{name}.{key}"]) for key, weight in weights.items()):
            gathers[name] = [_set_extensions(weight, module) for weight in weights.values()]
    if not gathers:
        raise NothingToGather(
            "gathers nothing: no weight in a recipe that can be gathered is cut evenly over data ranks along its first dimension "
            "(the ranks that shard a set of experts must divide their number); set it to false"
        )
    for name in gathers:
        conversion.converted[name] += ", gathered in FP8"
    with_scale = [gather for each in gathers.values() for gather in each if isinstance(gather, TensorGather)]
    data_mesh = plan["norm.weight"].data_mesh
    return Scales(with_scale, data_mesh.get_group(data_mesh.ndim - 1)) if with_scale else None


def _set_extensions(weight: DTensor, module: nn.Module) -> TileGather | TensorGather:
    shard = weight._local_tensor  # the one that FSDP2 asks, of which to_local() would give another
    gather = TensorGather(shard, module.linear_mm_config) if isinstance(module, nn.Linear) else TileGather(shard)
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = gather.fsdp_pre_all_gather, gather.fsdp_post_all_gather
    return gather


def _evenly_cut(weight: nn.Parameter, row: PlanRow) -> bool:
    if not row.fsdp or row.data_mesh.shape[-1] == 1 or row.shard_dim:
        return False
    parts = 1
    for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        parts *= size if getattr(placement, "dim", None) == 0 else 1
    return weight.shape[0] % parts == 0
