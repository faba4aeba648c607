"""Applies a parallel layout to a model, in the one order in which the parts fit together."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from parallelisms.activation_checkpoint import checkpoint_blocks, checkpoint_selectively
from parallelisms.compile import apply_compile
from parallelisms.dispatch.capacity import RowCapacity
from parallelisms.expert_parallel import apply_expert_parallel
from parallelisms.folded_mesh import FoldedMesh
from parallelisms.fsdp import apply_fsdp
from parallelisms.sharding_plan import ShardingPlan
from parallelisms.tensor_parallel import apply_tensor_parallel


@dataclass(frozen=True)
class ParallelOptions:
    """How the layout is carried out; none of these changes a result beyond rounding.

    ``dispatch_tokens``: the most tokens that a rank has in a micro-batch; ``dispatch_sms``: see
    :func:`parallelisms.dispatch.build_dispatcher` for both; ``capacity_factor``: see
    :class:`parallelisms.dispatch.capacity.RowCapacity`; ``stash_factor``: rows that the experts of all layers together keep for
    backward, times those of even loads, where a dispatcher gives fixed room; None keeps all that room.
    ``dispatch_domain``: see :func:`parallelisms.domains.domain_size`.
    ``recompute_option``: for selective recomputation "op", or k as a string for every k-th block in full.
    ``compile_backend``: None compiles nothing.
    """

    dispatcher: str = "auto"
    dispatch_tokens: int = 0
    dispatch_sms: int | None = None
    dispatch_domain: int | None = None
    capacity_factor: float | None = None
    stash_factor: float | None = None
    param_dtype: torch.dtype = torch.bfloat16
    reshard_after_forward: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_option: str = "op"
    compile_backend: str | None = None


def parallelize(model: nn.Module, mesh: FoldedMesh, options: ParallelOptions, capacity: RowCapacity) -> ShardingPlan:
    """Parallelises a model that lies on the meta device, in place, and returns where everything lies.

    ``capacity`` bounds the rows of the experts; the caller takes its note after each step.

    Tensor and expert parallelism place parameters; selective recomputation goes inside compiled regions and recomputation of
    whole blocks around them, since a compiled block is several graphs; FSDP2 comes last and shards what the others placed.
    """
    if mesh.layout.tp > 1:
        apply_tensor_parallel(model, mesh.dim("tp"))
    apply_expert_parallel(
        model, mesh, options.dispatcher, options.dispatch_tokens, options.dispatch_sms, options.param_dtype, capacity,
        options.dispatch_domain,
    )  # fmt: skip
    plan = ShardingPlan(model, mesh)
    selective = options.recompute == "selective"
    if selective and options.recompute_option == "op":
        checkpoint_selectively(model)
    if options.compile_backend is not None:
        apply_compile(model, options.compile_backend)
    if options.recompute == "full":
        checkpoint_blocks(model, every=1)
    elif selective and options.recompute_option != "op":
        checkpoint_blocks(model, every=int(options.recompute_option))
    apply_fsdp(model, plan, options.param_dtype, options.reshard_after_forward)
    return plan
