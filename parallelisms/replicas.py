"""Parameters that every data rank holds whole: the routers', which compute in fp32 and are small.

One collective a step sums all their gradients, where FSDP2 would gather and reduce each layer's on its own, thrice in a
micro-batch. A rank holds 16 bytes a parameter for it, weight, gradient and moments.
"""

import torch
import torch.distributed as dist
from torch import nn

from parallelisms.sharding_plan import ShardingPlan, local


@torch.no_grad()
def sum_replicas(model: nn.Module, plan: ShardingPlan) -> None:
    """Sums the gradients of this step over the data ranks, all of which must call it; where there is none, it is zero."""
    parameters = [parameter for name, parameter in model.named_parameters() if plan[name].replicated]
    if not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [local(parameter.grad) for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    mesh = next(row.data_mesh for row in plan.rows if row.replicated)
    for dim in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(dim))
    torch._foreach_copy_(
        grads, [part.view_as(grad) for part, grad in zip(flat.split([g.numel() for g in grads]), grads, strict=True)]
    )
