"""Tensor parallelism with sequence parallelism for the dense part of torchtitan's models."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.distributed import NoParallel

from parallelisms.blocks import blocks


class LocalTokens(ParallelStyle):
    """A module that works on this rank's share of the sequence as a plain tensor; its parameters are replicated DTensors.

    The module itself declares its gradients partial where they are (each rank sees other tokens).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_local(_: nn.Module, args: tuple) -> tuple:
            x = args[0]
            return (x.to_local() if isinstance(x, DTensor) else x, *args[1:])

        module.register_forward_pre_hook(to_local)
        return module


class VocabularyParallel(RowwiseParallel):
    """An embedding cut by vocabulary whose output is complete when it leaves.

    A compiled block silently loses the gradient of an input that is still in flight.
    """

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.redistribute(placements=output_layouts).to_local()


class VocabularyHead(ParallelStyle):
    """An output projection cut by vocabulary, on plain tensors: the whole sequence in, its share of the vocabulary out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole_sequence(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            h = DTensor.from_local(args[0], device_mesh, [Shard(1)])
            return (h.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),)

        def cut(_: str, head: nn.Module, mesh: DeviceMesh) -> None:
            head.weight = nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))

        module.register_forward_pre_hook(whole_sequence)
        return distribute_module(module, device_mesh, cut)


class ReplicatedParameters(ParallelStyle):
    """Parameters become replicated DTensors; inputs and outputs stay as they are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Places every dense parameter of the model on ``mesh`` and hooks the modules, in place.

    Between modules the residual stream is a plain tensor [B, S / tp, D]. Logits leave as this rank's share of the vocabulary.

    Args:
        model: a torchtitan llama3, qwen3 or deepseek_v3 model on any device.
        mesh: one-dimensional, of more than one rank.
    """
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": VocabularyParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "output": VocabularyHead(),
    }
    tied = getattr(model, "enable_weight_tying", False)
    for name, block in blocks(model).items():
        plan |= {f"{name}.{key}": style for key, style in _block_plan(block).items()}
    parallelize_module(model, mesh, plan)
    if tied:
        model.output.weight = model.tok_embeddings.weight


def weight_parts(model: nn.Module, degree: int) -> dict[str, tuple[int, int]]:
    """Into how many parts the two dimensions of the weights of blocks' linear layers and of the head are cut, by name."""
    parts = {ColwiseParallel: (degree, 1), RowwiseParallel: (1, degree)}
    return {"output": (degree, 1)} | {
        f"{name}.{key}": parts.get(type(style), (1, 1))
        for name, block in blocks(model).items()
        for key, style in _block_plan(block).items()
        if isinstance(block.get_submodule(key), nn.Linear)
    }


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    plan |= _mla_plan(block.attention) if hasattr(block.attention, "wkv_a") else _gqa_plan(block.attention)
    if getattr(block, "moe_enabled", False):
        plan |= {"moe": LocalTokens(), "moe.router.gate": ReplicatedParameters()}
        if block.moe.shared_experts is not None:
            plan |= _feed_forward_plan("moe.shared_experts")
    else:
        plan |= _feed_forward_plan("feed_forward")
    if hasattr(block, "eh_proj"):
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("enorm", "hnorm", "mtp_norm")}
        plan["eh_proj"] = ReplicatedParameters()
    return plan


def _feed_forward_plan(name: str) -> dict[str, ParallelStyle]:
    return {
        name: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        f"{name}.w1": ColwiseParallel(),
        f"{name}.w2": RowwiseParallel(output_layouts=Shard(1)),
        f"{name}.w3": ColwiseParallel(),
    }


def _gqa_plan(attention: nn.Module) -> dict[str, ParallelStyle]:
    # The query and key norms act on DTensors cut by head; without them local heads suffice.
    norms = getattr(attention, "q_norm", None) is not None
    plan: dict[str, ParallelStyle] = {
        "attention": _attention_input(rope=Replicate() if norms else None),
        "attention.wq": ColwiseParallel(use_local_output=not norms),
        "attention.wk": ColwiseParallel(use_local_output=not norms),
        "attention.wv": ColwiseParallel(use_local_output=not norms),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    if norms:
        plan |= {
            "attention.q_norm": SequenceParallel(sequence_dim=2),
            "attention.k_norm": SequenceParallel(sequence_dim=2),
            "attention.inner_attention": _local_heads(),
        }
    return plan


def _mla_plan(attention: nn.Module) -> dict[str, ParallelStyle]:
    # The latent projections are whole on every rank, the up-projections cut by head.
    plan: dict[str, ParallelStyle] = {
        "attention": _attention_input(rope=Replicate()),
        "attention.wkv_a": NoParallel(use_local_output=False),
        "attention.kv_norm": NoParallel(use_local_output=False),
        "attention.wkv_b": ColwiseParallel(use_local_output=False),
        "attention.inner_attention": _local_heads(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    if attention.q_lora_rank == 0:
        plan["attention.wq"] = ColwiseParallel(use_local_output=False)
    else:
        plan |= {
            "attention.wq_a": NoParallel(use_local_output=False),
            "attention.q_norm": NoParallel(use_local_output=False),
            "attention.wq_b": ColwiseParallel(use_local_output=False),
        }
    return plan


def _attention_input(rope: Replicate | None) -> ParallelStyle:
    # Arguments: tokens, rotary cache, masks, positions.
    return PrepareModuleInput(input_layouts=(Shard(1), rope, None, None), desired_input_layouts=(Replicate(), rope, None, None))


def _local_heads() -> ParallelStyle:
    return PrepareModuleInput(input_layouts=(Shard(1),) * 3, desired_input_layouts=(Shard(1),) * 3, use_local_output=True)


def own_copy(parameter: Tensor) -> Tensor:
    """This rank's copy of a replicated parameter; its gradient is partial, since tensor-parallel peers see other tokens."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


def sequence_share(x_BS: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share [B, S / tp] of a per-position tensor, as sequence parallelism cuts the residual stream."""
    return x_BS.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
