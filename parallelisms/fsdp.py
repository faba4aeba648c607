"""FSDP2 and HSDP for dense and expert parameters, each over its own data ranks."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from parallelisms.blocks import blocks
from parallelisms.sharding_plan import ShardingPlan

# The embedding's output may be a view of a collective's buffer; no model here writes into it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(model: nn.Module, plan: ShardingPlan, param_dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Wraps experts, block, embeddings and head as FSDP2 units, in place, as far as the plan gives them to FSDP2.

    They compute in ``param_dtype``. Gradients are summed in fp32 and never divided: the loss is already divided by the trained
    tokens of the global batch.
    """
    compute = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    # Routing weights come in fp32 and stay so.
    experts = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if not plan["norm.weight"].fsdp:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    unmanaged = {parameter for parameter, name in names.items() if not plan[name].fsdp}

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(plan[names[parameter]].shard_dim)

    dense = plan["norm.weight"].data_mesh

    def wrap(module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy, mesh: DeviceMesh = dense) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=place,
            ignored_params=unmanaged,
        )

    tied = getattr(model, "enable_weight_tying", False)
    if not tied:
        wrap(model.tok_embeddings, compute)
        model.tok_embeddings.set_unshard_in_backward(False)  # a gradient of rows needs no weights
    for name, block in blocks(model).items():
        if getattr(block, "moe_enabled", False) and (row := plan[f"{name}.moe.experts.w13"]).fsdp:
            wrap(block.moe.experts, experts, row.data_mesh)
        wrap(block, compute)
    if not tied:
        wrap([model.norm, model.output], compute)
    wrap(model, compute)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
