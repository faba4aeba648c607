"""Products of linear layers whose weight is cut over the ranks of tensor parallelism."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def on_shards(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight_NK: Tensor) -> Tensor:
    """``product(x, weight)``; of DTensors on what this rank holds of both, which are the operands that it quantises.

    Outputs are as torch's own linear of DTensors gives them: cut along the last dimension for a weight cut by rows, partial sums
    for one cut by columns.
    """
    if not isinstance(weight_NK, DTensor):
        return product(x, weight_NK)
    [cut] = weight_NK.placements
    if cut == Shard(0):
        local_x, placement = x.to_local(grad_placements=[Partial()]), Shard(x.ndim - 1)
    else:
        local_x, placement = x.to_local(), Partial() if cut == Shard(1) else Replicate()
    return DTensor.from_local(product(local_x, weight_NK.to_local()), weight_NK.device_mesh, [placement], run_check=False)
