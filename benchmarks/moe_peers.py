"""The MoE layers of other trainers with the weights of ours, on [1, T, D], as they stand after install.

torchtitan's also with its experts over the ranks of a mesh whose one dimension is "ep"; every rank has all of our weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import moe as titan

from moe_titan.layers.moe import MoE


def moe_args(experts: int, top_k: int) -> titan.MoEArgs:
    """Softmax scores normalised over the K choices, weights on the experts' outputs, no shared experts."""
    return titan.MoEArgs(
        num_experts=experts,
        num_shared_experts=0,
        top_k=top_k,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        load_balance_coeff=None,
    )


@contextmanager
def torchtitan_layer(ours: MoE, ep: DeviceMesh | None = None) -> Iterator[nn.Module]:
    w13, w2, gate = _weights(ours)
    experts, _, hidden_dim, dim = w13.shape
    with torch.device("meta"):
        layer = titan.MoE(moe_args(experts, ours.router.options.top_k), dim, hidden_dim)
    w1, w3 = (w13[:, half].contiguous() for half in range(2))
    layer.load_state_dict({"experts.w1": w1, "experts.w3": w3, "experts.w2": w2, "router.gate.weight": gate}, assign=True)
    layer.tokens_per_expert = torch.zeros(experts, device=w13.device)
    layer.expert_bias = ours.expert_bias
    if ep is not None:
        parallelize_module(layer.experts, ep, ExpertParallel())
    yield layer


@contextmanager
def torchtitan_compiled(ours: MoE, ep: DeviceMesh | None = None) -> Iterator[nn.Module]:
    """Compiled by torchtitan's own function, which also replaces a global of its module."""
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama4.infra.parallelize import apply_compile

    model, block = nn.Module(), nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    torch._dynamo.reset()  # shapes of an earlier layer would make this one's dynamic
    with (
        torchtitan_layer(ours, ep) as block.moe,
        patch.object(titan, "_run_experts_grouped_mm", titan._run_experts_grouped_mm),
        torch._functorch.config.patch(donated_buffer=False),  # so that a backward pass can be timed many times over
    ):
        block.moe_enabled = True
        apply_compile(model, Compile(enable=True), ep_enabled=ep is not None)
        yield block.moe


@contextmanager
def transformers_layer(ours: MoE) -> Iterator[nn.Module]:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    w13, w2, gate = _weights(ours)
    experts, _, hidden_dim, dim = w13.shape
    config = Qwen3MoeConfig(
        hidden_size=dim,
        moe_intermediate_size=hidden_dim,
        num_experts=experts,
        num_experts_per_tok=ours.router.options.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = Qwen3MoeSparseMoeBlock(config)
    weights = {"experts.gate_up_proj": w13.flatten(1, 2), "experts.down_proj": w2, "gate.weight": gate}
    layer.load_state_dict(weights, assign=True)
    yield layer


def _weights(ours: MoE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = ours.experts
    return experts.w13.detach(), experts.w2.detach(), ours.router.gate.weight.detach().bfloat16()


PEERS = {"torchtitan": torchtitan_layer, "transformers": transformers_layer, "torchtitan-compiled": torchtitan_compiled}
