"""FLOPs per token against figures worked out by hand and against torch's own counter on small models."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, qwen3_args

from moe_titan.flops import ModelArgs, num_parameters, peak_flops, train_flops_per_token
from moe_titan.layers.prediction import Further, predicting
from parallelisms.routing import RoutingTape

# Weighting the routing before the experts leaves no batched product that the counter would add.
MOE = MoEArgs(num_experts=6, num_shared_experts=0, top_k=2, score_before_experts=True, use_grouped_mm=False)
QWEN3 = Qwen3ModelArgs(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=97, head_dim=16, hidden_dim=80)
QWEN3_MOE = replace(QWEN3, moe_enabled=True, moe_inter_dim=24, moe_args=MOE)
DEEPSEEK_V3 = DeepSeekV3ModelArgs(
    dim=48,
    inter_dim=80,
    moe_inter_dim=24,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    vocab_size=97,
    max_seq_len=64,
    moe_args=replace(MOE, num_shared_experts=2),
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
LLAMA3 = TransformerModelArgs(dim=48, n_layers=2, n_heads=6, n_kv_heads=3, vocab_size=97, multiple_of=32, max_seq_len=64)
SMALL_MODELS = {
    "qwen3": (Qwen3Model, QWEN3),
    "qwen3_moe": (Qwen3Model, QWEN3_MOE),
    "deepseek_v3": (DeepSeekV3Model, DEEPSEEK_V3),
    "deepseek_v3_q_lora": (DeepSeekV3Model, replace(DEEPSEEK_V3, q_lora_rank=28)),
    "llama3": (Transformer, LLAMA3),
    "llama3_multiplier": (Transformer, replace(LLAMA3, n_kv_heads=None, ffn_dim_multiplier=1.3)),
}


@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_matches_torch_flop_counter(name: str, mtp_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has no histogram of integers on the CPU, and counts attention there only as plain products.
    monkeypatch.setattr(torch, "histc", lambda x, bins, min, max: torch.bincount(x, minlength=bins))
    monkeypatch.setattr(ScaledDotProductAttentionWrapper, "sdpa_backends", [SDPBackend.MATH])
    model_class, args = SMALL_MODELS[name]
    args.moe_impl = "standard"  # no field of DeepSeekV3ModelArgs, but read by its blocks
    torch.manual_seed(0)
    model = predicting(model_class)(args, mtp_layers) if mtp_layers else model_class(args)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    batch, seq_len = 3, 20
    tokens_BS = torch.randint(args.vocab_size, (batch, seq_len))
    further = [Further(tokens_BS, torch.ones(batch * seq_len, dtype=torch.bool))] * mtp_layers
    with FlopCounterMode(display=False) as counter, RoutingTape().recording():
        model(tokens_BS, **({"further": further} if further else {})).sum().backward()
    # The counter takes all of the attention scores, we take half: twice the length gives the same.
    assert counter.get_total_flops() == batch * seq_len * train_flops_per_token(args, 2 * seq_len, mtp_layers)


@pytest.mark.parametrize(
    "args, gflop",
    [
        # Per layer 18.87M attention, 37.75M expert and 0.26M gate weights; head 311.16M; scores 2 x 4096 x 2048.
        (replace(qwen3_args["30B-A3B"], n_layers=12), 7.17),
        (qwen3_args["30B-A3B"], 23.08),
        # Per layer 13.76M attention, (6 + 2) x 8.65M expert and 0.13M gate weights, the first 67.2M dense; head 209.7M.
        (replace(deepseekv3_args["16B"], n_layers=12), 7.98),
    ],
)
def test_known_models(args: ModelArgs, gflop: float) -> None:
    assert train_flops_per_token(args, 4096) / 1e9 == pytest.approx(gflop, abs=0.005)


def test_num_parameters_counts_tied_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(10, 3))
    assert num_parameters(model) == 40 + 40 + 33
    model[1].weight = model[0].weight
    assert num_parameters(model) == 40 + 33


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_peak_flops(name: str, tflops: int) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce GTX 1080", "cpu"])
def test_peak_flops_unknown(name: str) -> None:
    assert peak_flops(name) is None
