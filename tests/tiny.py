"""Small models with odd sizes, and random batches, for comparing layouts on the CPU."""

from dataclasses import replace

import torch
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.moe.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from moe_titan.data import IGNORED, MicroBatch
from moe_titan.engine import Engine, TrainOptions
from parallelisms.folded_mesh import FoldedMesh, Layout
from parallelisms.parallelize import ParallelOptions

VOCAB, SEQ = 40, 24


def qwen3(**moe) -> tuple[str, Qwen3ModelArgs]:
    moe_args = dict(num_experts=8, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True) | moe
    return "qwen3", Qwen3ModelArgs(
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        head_dim=8,
        dim=24,
        n_layers=2,
        n_heads=8,
        n_kv_heads=8,
        qk_norm=True,
        hidden_dim=32,
        moe_enabled=True,
        moe_inter_dim=16,
        moe_args=MoEArgs(**moe_args, load_balance_coeff=1e-2, score_before_experts=False),
    )


def deepseek(**moe) -> tuple[str, DeepSeekV3ModelArgs]:
    moe_args = dict(num_experts=6, num_shared_experts=1, top_k=2, score_func="sigmoid", route_norm=True) | moe
    args = DeepSeekV3ModelArgs(
        vocab_size=VOCAB,
        max_seq_len=SEQ,
        dim=24,
        inter_dim=40,
        moe_inter_dim=16,
        n_layers=2,
        n_dense_layers=1,
        n_heads=8,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        moe_args=MoEArgs(**moe_args, load_balance_coeff=1e-2, score_before_experts=False, route_scale=1.5),
    )
    args.moe_impl = "standard"
    return "deepseek_v3", args


def global_batch(step: int, samples: int, seq: int = SEQ, padded: bool = False) -> MicroBatch:
    """Random tokens of one step; some labels are not trained on, and with ``padded`` the tail of some rows is padding."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (samples, seq + 1), generator=generator)
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED
    valid = None
    if padded:
        lengths = torch.randint(1, seq + 1, (samples, 1), generator=generator)
        valid = torch.arange(seq) < lengths
        labels[~valid] = IGNORED
    return MicroBatch(inputs, labels, valid)


def share(batch: MicroBatch, rank: int, ranks: int, accumulate: int) -> list[MicroBatch]:
    """A data rank's micro-batches of a global batch; the n-th ones of all ranks hold the same samples for any number of ranks."""
    parts = []
    for micro in range(accumulate):
        rows = slice(micro + accumulate * rank, None, accumulate * ranks)
        parts.append(MicroBatch(*(None if field is None else field[rows] for field in batch)))
    return parts


def padded_batch(step: int, samples: int) -> MicroBatch:
    return global_batch(step, samples, padded=True)


def build(model, layout: Layout, train: TrainOptions | None = None, **parallel) -> Engine:
    mesh = FoldedMesh(layout, "cpu")
    options = replace(ParallelOptions(param_dtype=torch.float32), **parallel)
    return Engine(*model, mesh, torch.device("cpu"), train or TrainOptions(), options)
