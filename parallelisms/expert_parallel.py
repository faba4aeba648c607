"""Places the experts' parameters on the ep and etp ranks and gives each MoE layer its dispatcher."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from parallelisms.blocks import blocks
from parallelisms.dispatch import build_dispatcher
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.folded_mesh import FoldedMesh

SHARD_DIMS = {"w13": {"ep": 0, "etp": 2}, "w2": {"ep": 0, "etp": 2}}
"""ep cuts by expert; etp cuts the expert width, which is dimension 2 of w13 [E, 2, F, D] and of w2 [E, D, F]."""


def apply_expert_parallel(
    model: nn.Module,
    mesh: FoldedMesh,
    dispatcher: str,
    max_tokens: int,
    dispatch_sms: int | None,
    dtype: torch.dtype,
    capacity: RowCapacity,
    domain: int | None,
) -> None:
    """Cuts w13 and w2 of every MoE layer over ep and etp, in place, and sets its dispatcher of the given kind."""
    layout, model_mesh, domains = mesh.layout, mesh.expert_model, mesh.dispatch_domains(domain)
    for block in blocks(model).values():
        if not getattr(block, "moe_enabled", False):
            continue
        experts = block.moe.experts
        if model_mesh is not None:
            for name, dims in SHARD_DIMS.items():
                placements = [Shard(dims[dim]) for dim in model_mesh.mesh_dim_names]
                parameter = distribute_tensor(getattr(experts, name), model_mesh, placements)
                setattr(experts, name, nn.Parameter(parameter))
        block.moe.dispatcher = build_dispatcher(
            dispatcher, experts.num_experts, mesh.dispatch_group, layout.ep, layout.etp, max_tokens, dispatch_sms, dtype,
            capacity, domains,
        )  # fmt: skip
