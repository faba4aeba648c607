"""All that a run consists of, under the keys of torchtitan 0.2.2: model, optimizer, schedule, data position, random numbers.

Every tensor carries its place in the whole, so that any layout loads what any other saved. Optimizer state lies under
``optimizer.state.<parameter>.<moment>``; fused expert weights appear as the two parameters they hold.
"""

import json
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_titan.checkpoint.errors import CheckpointError
from moe_titan.data import DataLoader
from moe_titan.engine import Engine
from parallelisms.sharding_plan import logical_tensors
from parallelisms.split_weights import Split

if TYPE_CHECKING:
    from moe_titan.config import Config

CORPUS_KEYS = (
    *(f"training.{key}" for key in ("dataset", "dataset_config", "dataset_split", "text_key", "tokenizer")),
    "debug.seed",
)
"""What a position in the data is a position in. Files may have moved, so their path is not among it."""


_PLACEMENT = "expert_placement"


class Progress(NamedTuple):
    """How far a run is: optimizer steps and tokens trained, and the steps that its learning rate has gone through."""

    step: int = 0
    tokens: int = 0
    schedule_step: int = 0


class RunState:
    """The state of a run's parts, gathered to be saved or loaded into, and put back.

    Args:
        config: of it the optimizer's settings, which are saved for torchtitan, and what the position in the data is one in.
    """

    def __init__(self, config: "Config", engine: Engine, data: DataLoader):
        self.config, self.engine, self.data = config, engine, data

    def parameters(self) -> dict[str, Tensor | Split]:
        """Sharing storage."""
        optimizer = self.engine.optimizer
        names = {parameter: name for name, parameter in optimizer.parameters.items()}
        masters = optimizer.masters()
        state: dict[str, Tensor | Split] = {}
        # Tied parameters stand under each of their names.
        for name, parameter in self.engine.model.named_parameters(remove_duplicate=False):
            master = masters[names[parameter]]
            state |= master.logical(name) if isinstance(master, Split) else logical_tensors(name, master)
        return state

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the persistent ones."""
        return {name: buffer.clone() for name, buffer in self._buffers()}

    def run(self, progress: Progress) -> dict[str, Any]:
        """Everything but the model that this project needs to continue."""
        optimizer = self.engine.optimizer
        state: dict[str, Any] = {}
        for name, moment, tensor in optimizer.moments():
            for logical, part in logical_tensors(name, tensor):
                state[f"optimizer.state.{logical}.{moment}"] = part
        for name, count in optimizer.step_counts():
            for logical, _ in logical_tensors(name, optimizer.parameters[name]):
                state[f"optimizer.state.{logical}.step"] = count.cpu().clone()
        state |= {f"{_PLACEMENT}.{layer}": torch.tensor(slots) for layer, slots in self.engine.placement.expert_of_slot.items()}
        state |= {f"{self._random_key}.{kind}": random for kind, random in _random_states(self.engine.device).items()}
        return state | {
            "lr_scheduler.last_epoch": progress.schedule_step,
            "train_state.step": progress.step,
            "train_state.ntokens_seen": progress.tokens,
            "dataloader.position": self._data_position(),
            "dataloader.corpus": json.dumps({key: self.config.get(key) for key in CORPUS_KEYS}),
        }

    def wanted(self, saved: Container[str]) -> dict[str, Any]:
        """Of :meth:`run` what is to be loaded."""
        excluded = tuple(f"{part}." for part in self.config.checkpoint.exclude_from_loading)
        wanted = {key: value for key, value in self.run(Progress()).items() if not key.startswith(excluded)}
        # A run on more ranks than the saved one, and one that torchtitan saved, has no random numbers to continue with; nor has
        # torchtitan a placement of experts.
        optional = ("rng.", "dataloader.corpus", _PLACEMENT)
        return {key: value for key, value in wanted.items() if key in saved or not key.startswith(optional)}

    def for_torchtitan(self, progress: Progress, next_lr: float) -> dict[str, Any]:
        """What torchtitan wants to find besides, and this project takes from the configuration.

        Args:
            next_lr: learning rate of the step to come.
        """
        optimizer, lr = self.engine.optimizer, self.config.optimizer.lr
        adam = torch.optim.AdamW([torch.empty(0)], **optimizer.settings)
        group = adam.defaults | {"lr": next_lr, "initial_lr": lr}
        schedule = {
            "base_lrs": [lr],
            "_last_lr": [next_lr],
            "_step_count": progress.schedule_step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
        }
        state = {f"lr_scheduler.{key}": value for key, value in schedule.items()}
        for name, parameter in optimizer.parameters.items():
            for logical, _ in logical_tensors(name, parameter):
                state |= {f"optimizer.param_groups.{logical}.{key}": value for key, value in group.items()}
        return state

    def restore_buffers(self, state: dict[str, Any]) -> None:
        """Puts back what has been loaded into :meth:`buffers`."""
        for name, buffer in self._buffers():
            buffer.copy_(state[name])

    def restore_run(self, state: dict[str, Any]) -> Progress:
        """Puts back what has been loaded into :meth:`wanted`. Into the moments it has been loaded directly.

        Raises:
            CheckpointError: the position in the data is one in other data.
        """
        for name, count in self.engine.optimizer.step_counts():
            logical, _ = next(iter(logical_tensors(name, self.engine.optimizer.parameters[name])))
            if (key := f"optimizer.state.{logical}.step") in state:
                count.copy_(state[key])
        for key, value in json.loads(state.get("dataloader.corpus", "{}")).items():
            if self.config.get(key) != value:
                what = f"the position in the data is of a run with {value!r}; go back to it, or read the data from its start by"
                raise CheckpointError(self.config.problem(key, f'{what} checkpoint.exclude_from_loading = ["dataloader"]'))
        if "dataloader.position" in state:
            try:
                self.data.load_state_dict({"position": state["dataloader.position"]})
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        for layer in self.engine.placement.expert_of_slot:
            if (key := f"{_PLACEMENT}.{layer}") in state:
                self.engine.placement.expert_of_slot[layer] = state[key].tolist()
        if f"{self._random_key}.cpu" in state:
            torch.set_rng_state(state[f"{self._random_key}.cpu"])
        if f"{self._random_key}.cuda" in state:
            torch.cuda.set_rng_state(state[f"{self._random_key}.cuda"], self.engine.device)
        keys = ("train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch")
        return Progress(*(int(state.get(key, 0)) for key in keys))

    @property
    def _random_key(self) -> str:
        return f"rng.rank_{dist.get_rank()}"

    def _data_position(self) -> Tensor:
        """Where every stream of the global batch stands, put together from the data ranks."""
        position = self.data.state_dict()["position"].to(self.engine.device)
        if self.engine.mesh.data_group is not None:
            dist.all_reduce(position, group=self.engine.mesh.data_group)
        return position.cpu()

    def _buffers(self) -> Iterable[tuple[str, Tensor]]:
        model = self.engine.model
        persistent = model.state_dict().keys()
        return [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states
