"""Two meshes over the same ranks: one for the dense part, one for the experts (parallel folding, arXiv 2504.14960)."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelisms.domains import Domains, domain_size

DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "edp_replicate", "edp_shard", "ep", "etp")


@dataclass(frozen=True)
class Layout:
    """Degrees of a parallel layout; ``world`` follows from the dense ones.

    The expert degrees divide the same ranks anew: ep x etp consecutive ranks of a pipeline stage share one set of experts, so ep
    folds over tp first, then cp, dp_shard and dp_replicate, and what is left of the stage are the expert-data ranks.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.stage % (self.ep * self.etp):
            raise ValueError(
                f"ep * etp = {self.ep} * {self.etp} does not divide the {self.stage} ranks of a pipeline stage "
                f"(dp_replicate * dp_shard * cp * tp); choose ep and etp whose product divides {self.stage}"
            )

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def world(self) -> int:
        return self.pp * self.stage

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp_shard(self) -> int:
        """Expert-data ranks among which an expert is sharded: those left of a dense replica's ranks."""
        replica = self.dp_shard * self.cp * self.tp
        return replica // math.gcd(replica, self.ep * self.etp)

    @property
    def edp_replicate(self) -> int:
        return self.stage // (self.ep * self.etp * self.edp_shard)


class FoldedMesh:
    """The dense and the expert mesh of a :class:`Layout`, and the one place that hands out process groups.

    A mesh dimension of size 1 has no group: ``group`` returns None, and nothing communicates over it.
    """

    def __init__(self, layout: Layout, device_type: str):
        """Collective over all ranks. Raises ValueError when the default group's size is not the layout's."""
        if layout.world != dist.get_world_size():
            raise ValueError(
                f"the layout {layout} needs {layout.world} ranks, but {dist.get_world_size()} are running; "
                "start that many or change the parallel degrees"
            )
        self.layout, self.device_type = layout, device_type
        self.dense = init_device_mesh(device_type, tuple(getattr(layout, dim) for dim in DENSE_DIMS), mesh_dim_names=DENSE_DIMS)
        self.expert = init_device_mesh(
            device_type, tuple(getattr(layout, dim) for dim in EXPERT_DIMS), mesh_dim_names=EXPERT_DIMS
        )

    def dim(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of a dimension of either mesh."""
        return (self.expert if name in EXPERT_DIMS[1:] else self.dense)[name]

    def coordinate(self, name: str) -> int:
        return self.dim(name).get_local_rank()

    def group(self, name: str) -> ProcessGroup | None:
        mesh = self.dim(name)
        return mesh.get_group() if mesh.size() > 1 else None

    @property
    def dense_data(self) -> DeviceMesh:
        """Over which FSDP2 shards and reduces dense parameters: (dp_replicate, dp_shard), or dp_shard alone without replicas."""
        return self._data(self.dense, "dp_replicate", "dp_shard")

    @property
    def expert_data(self) -> DeviceMesh:
        """Over which FSDP2 shards and reduces expert parameters."""
        return self._data(self.expert, "edp_replicate", "edp_shard")

    @property
    def expert_model(self) -> DeviceMesh | None:
        """Over which each expert parameter is cut: ep, etp or both; None when neither is in use."""
        dims = tuple(dim for dim in ("ep", "etp") if getattr(self.layout, dim) > 1)
        return self.expert[dims] if dims else None

    @cached_property
    def dispatch_group(self) -> ProcessGroup | None:
        """The ep x etp ranks among which tokens travel, etp varying fastest."""
        mesh = self.expert_model
        if mesh is None:
            return None
        return (mesh if mesh.ndim == 1 else mesh._flatten("dispatch")).get_group()

    def dispatch_domains(self, wanted: int | None) -> Domains | None:
        """The dispatch group as :func:`parallelisms.domains.domain_size` divides it, or None. Collective over all ranks."""
        ranks = self.layout.ep * self.layout.etp
        size = domain_size(self.layout.ep, self.layout.etp, wanted) if ranks > 1 else None
        if size is None:
            return None
        shape = self.layout.world // ranks, ranks // size, size
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("copy", "between", "within"))
        return Domains(mesh.get_group("between"), mesh.get_group("within"))

    @cached_property
    def expert_shard_group(self) -> ProcessGroup | None:
        """The edp_shard x ep ranks among which the experts are cut one by one, ep varying fastest."""
        if self.layout.edp_shard == 1:
            return self.group("ep")
        return self.expert["edp_shard", "ep"]._flatten("expert_shard").get_group()

    @cached_property
    def stage_group(self) -> ProcessGroup | None:
        """All ranks of this pipeline stage: each holds different tokens of the same layers."""
        if self.layout.stage == 1:
            return None
        if self.layout.pp == 1:
            return dist.group.WORLD
        return self.dense[DENSE_DIMS[1:]]._flatten("stage").get_group()

    @cached_property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that read different samples, this one's tensor-parallel peers aside."""
        if self.layout.dp == 1:
            return None
        if self.layout.dp_replicate == 1 or self.layout.dp_shard == 1:
            return self.group("dp_shard" if self.layout.dp_replicate == 1 else "dp_replicate")
        return self.dense["dp_replicate", "dp_shard"]._flatten("dp").get_group()

    @property
    def data_rank(self) -> int:
        """Which of the ``layout.dp`` shares of the global batch this rank reads."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @staticmethod
    def _data(mesh: DeviceMesh, replicate: str, shard: str) -> DeviceMesh:
        return mesh[replicate, shard] if mesh[replicate].size() > 1 else mesh[shard]
