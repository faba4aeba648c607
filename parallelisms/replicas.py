"""Parameters that every data rank holds whole: the routers', which compute in fp32 and are small.

One collective a step sums all their gradients, where FSDP2 would gather and reduce each layer's on its own, thrice in a
micro-batch. A rank holds 16 bytes a parameter for it, weight, gradient and moments, and 4 more meanwhile.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from parallelisms.sharding_plan import local


@torch.no_grad()
def sum_replicas(parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
    """Sums their gradients of this step over ``group``, all data ranks, which must call it together. None counts as zero."""
    if not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = _zero(parameter)
    grads = [local(parameter.grad) for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def _zero(parameter: nn.Parameter) -> Tensor:
    """A gradient, which tensor-parallel ranks have yet to sum up as they do where there is another."""
    zero = torch.zeros_like(local(parameter))
    if not isinstance(parameter, DTensor):
        return zero
    return DTensor.from_local(zero, parameter.device_mesh, [Partial()] * parameter.device_mesh.ndim, run_check=False)
