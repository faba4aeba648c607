"""One table that says of every parameter where it lies and over which ranks its gradient is summed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from parallelisms.folded_mesh import FoldedMesh

_EXPERTS = ".moe.experts."
_ROUTER = ".moe.router."
FUSED_PAIRS = {"w13": ("w1", "w3")}
"""Parameters that hold a pair of torchtitan's along dimension 1, and the names of the two."""


@dataclass(frozen=True)
class PlanRow:
    """One parameter of the model as it is stored.

    ``data_mesh`` is the mesh over which FSDP2 shards it along ``shard_dim`` and over which its gradient is summed; ``fsdp`` says
    whether it does: a parameter of a single data rank has nothing to gather or reduce, and of routers every data rank holds
    replicas (:mod:`parallelisms.replicas`). ``counted`` says whether this rank's shard enters global sums over parameters (of a
    shard's replicas exactly one does).
    """

    name: str
    kind: Literal["dense", "expert"]
    data_mesh: DeviceMesh
    shard_dim: int
    fsdp: bool
    counted: bool

    @property
    def replicated(self) -> bool:
        """Whether several data ranks hold it whole."""
        return not self.fsdp and self.data_mesh.size() > 1

    @property
    def split(self) -> bool:
        """Whether it is computed with in bf16, where it lies, if anything is (see :mod:`parallelisms.split_weights`)."""
        return not self.fsdp and _ROUTER not in self.name


class ShardingPlan:
    """The rows of all parameters, in the order of ``named_parameters``.

    Made when tensor and expert parallelism have placed the parameters and before FSDP2 wraps them. Wrapping, gradient norm,
    optimizer, initialisation and checkpoints read it.
    """

    def __init__(self, model: nn.Module, mesh: FoldedMesh):
        # Experts under FSDP2 need a root above them that prefetches.
        root = mesh.expert_data.size() > 1 and any(_EXPERTS in name for name, _ in model.named_parameters())
        self.rows = [self._row(name, parameter, mesh, root) for name, parameter in model.named_parameters()]
        self._by_name = {row.name: row for row in self.rows}

    def __getitem__(self, name: str) -> PlanRow:
        return self._by_name[name]

    @staticmethod
    def _row(name: str, parameter: nn.Parameter, mesh: FoldedMesh, root: bool) -> PlanRow:
        expert = _EXPERTS in name
        data_mesh = mesh.expert_data if expert else mesh.dense_data
        replicate = "edp_replicate" if expert else "dp_replicate"
        counted = mesh.coordinate(replicate) == 0
        if not expert and not _sharded_over_tp(parameter):
            counted = counted and mesh.coordinate("tp") == 0
        router = _ROUTER in name
        if router:
            counted = counted and not any(data_mesh.get_coordinate())
        shard_dim = _expert_shard_dim(parameter, data_mesh.shape[-1]) if expert else 0
        fsdp = not router and (data_mesh.size() > 1 or root)
        return PlanRow(name, "expert" if expert else "dense", data_mesh, shard_dim, fsdp, counted)


def _sharded_over_tp(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)


def _expert_shard_dim(parameter: nn.Parameter, shards: int) -> int:
    """By expert while every shard gets one, else within experts, along a divisible dimension that etp leaves whole."""
    held = local(parameter)
    if held.shape[0] >= shards:
        return 0
    cut = {p.dim for p in parameter.placements if isinstance(p, Shard)} if isinstance(parameter, DTensor) else set()
    inner = [dim for dim in range(held.ndim - 1, 0, -1) if dim not in cut and held.shape[dim] % shards == 0]
    return inner[0] if inner else 0


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that lies as ``tensor`` does, as such."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def logical_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A stored tensor under the names and shapes of torchtitan's state dict: itself, or the two halves of a fused pair.

    Works for a parameter, its gradient and its optimizer moments. Halves are views of the same storage, DTensors if ``tensor`` is
    one, so that loading into them loads the parameter.
    """
    prefix, _, leaf = name.rpartition(".")
    if leaf not in FUSED_PAIRS:
        yield name, tensor
        return
    for index, half in enumerate(FUSED_PAIRS[leaf]):
        yield f"{prefix}.{half}", _half(tensor, index)


def _half(tensor: Tensor, index: int) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.select(1, index)
    shape = torch.Size((tensor.shape[0], *tensor.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    local = tensor._local_tensor.detach().select(1, index)
    placements = [_without_dim_1(placement) for placement in tensor.placements]
    return DTensor.from_local(local, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _without_dim_1(placement: Placement) -> Placement:
    if isinstance(placement, _StridedShard):
        dim = placement.dim - (placement.dim > 1)
        return _StridedShard(dim=dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim - (placement.dim > 1))
    return placement
