"""A mixture of experts that starts as the function of a dense model (granular upcycling, arXiv 2410.07524).

Each feed-forward is cut into G shards along its hidden dimension, and each shard copied X times: expert x * G + g is copy x of
shard g. The rows of the router are random per copy and equal within it, so that the top k, a multiple of G, are whole copies,
whose weights sum to 1 and are equal within a copy. A copy then yields 1 / G of the dense output; a factor of G makes up for it.
It goes in equal parts into w3 and w2, in which an expert is linear (in w1, inside the SiLU, it is not).
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.moe.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from moe_titan.interchange.architectures import llama_hidden_dim
from moe_titan.interchange.stored_model import BIAS, StoredModel
from moe_titan.interchange.tensors import InterchangeError, Lazy, Parts

_ROUTER_STD = 0.02


@dataclass(frozen=True)
class Upcycling:
    """
    Args:
        granularity: G, the shards that a feed-forward is cut into.
        copies: X, of each shard; there are X * G experts.
        top_k: experts a token goes to, a multiple of G.
        shared_experts: of the width of one shard each, at most G. They hold copies of the first shards and take over half of
            their output, which the routed experts give up.
        noise: standard deviation of what is added to the experts' weights, relative to each weight's own.
        seed: of router and noise.
        drop_rope_scaling: accept that llama3's scaling of the rotary embedding is lost.
    """

    granularity: int
    copies: int
    top_k: int
    shared_experts: int = 0
    noise: float = 0.0
    seed: int = 0
    drop_rope_scaling: bool = False


def upcycle(dense: StoredModel, how: Upcycling) -> StoredModel:
    """The MoE model, of torchtitan's qwen3 kind (without norms of queries and keys where it comes from llama3), experts in fp32.

    Raises:
        InterchangeError: not a dense model of a known kind, or numbers that do not divide.
    """
    args = _dense_args(dense, how)
    _check(args, how)
    args = replace(
        args,
        moe_enabled=True,
        moe_inter_dim=args.hidden_dim // how.granularity,
        moe_args=MoEArgs(
            num_experts=how.granularity * how.copies,
            num_shared_experts=how.shared_experts,
            top_k=how.top_k,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
        ),
    )
    tensors: dict[str, Parts] = {}
    for key, parts in dense.tensors.items():
        assert isinstance(parts, Lazy)
        if ".feed_forward." in key:
            layer, weight = key.split(".feed_forward.")
            tensors |= _experts(layer, weight.removesuffix(".weight"), parts, how)
            if weight == "w3.weight":
                tensors |= _router(layer, args, how)
        else:
            tensors[key] = _rotating_halves(dense, key, parts)
    return StoredModel("qwen3", args, tensors, None, dense.assets, dense.notes)


def _dense_args(dense: StoredModel, how: Upcycling) -> Qwen3ModelArgs:
    args = dense.args
    if dense.mtp_layers:
        raise InterchangeError(
            "the dense model predicts further tokens, whose blocks are not upcycled; --drop-mtp leaves them out"
        )
    if isinstance(args, Qwen3ModelArgs) and not args.moe_enabled:
        return args
    if not isinstance(args, TransformerModelArgs):
        raise InterchangeError(
            f"this {dense.name} has experts already or another attention; dense llama3 and qwen3 can be upcycled"
        )
    if args.rope_scaling_args.scaling_factor != 1 and not how.drop_rope_scaling:
        raise InterchangeError(
            f"the rotary embedding is scaled by {args.rope_scaling_args.scaling_factor}, and that of the MoE model is never; "
            "--drop-rope-scaling goes on without, with another function than the dense model's"
        )
    return Qwen3ModelArgs(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads or args.n_heads,
        vocab_size=args.vocab_size,
        head_dim=args.dim // args.n_heads,
        hidden_dim=llama_hidden_dim(args),
        norm_eps=args.norm_eps,
        rope_theta=args.rope_theta,
        qk_norm=False,
        max_seq_len=args.max_seq_len,
        eos_id=args.eos_id,
    )


def _check(args: Qwen3ModelArgs, how: Upcycling) -> None:
    experts = how.granularity * how.copies
    if args.hidden_dim % how.granularity:
        raise InterchangeError(
            f"granularity = {how.granularity}: must divide the feed-forward's {args.hidden_dim} hidden features"
        )
    if how.top_k % how.granularity or how.top_k > experts:
        raise InterchangeError(
            f"top_k = {how.top_k}: must be a multiple of granularity = {how.granularity}, since a token goes to whole "
            f"copies, and at most the {experts} experts"
        )
    if how.shared_experts > how.granularity:
        raise InterchangeError(
            f"shared_experts = {how.shared_experts}: must be at most granularity = {how.granularity}, since each holds a shard"
        )


def _rotating_halves(dense: StoredModel, key: str, tensor: Lazy) -> Lazy:
    """llama3 rotates neighbouring features of queries and keys, qwen3 a head's halves, as Hugging Face's llama does."""
    if dense.name != "llama3" or not key.endswith(("attention.wq.weight", "attention.wk.weight")):
        return tensor
    adapter = Llama3StateDictAdapter(dense.args, None)
    return replace(tensor, load=lambda: next(iter(adapter.to_hf({key: tensor.load()}).values())))


def _experts(layer: str, weight: str, dense: Lazy, how: Upcycling) -> dict[str, Parts]:
    """Routed and shared experts from one weight of the dense feed-forward: w1 and w3 [F, D], w2 [D, F]."""
    hidden = dense.shape[1 if weight == "w2" else 0] // how.granularity
    factor = 1.0 if weight == "w1" else math.sqrt(how.granularity)

    def part(begin: int, end: int) -> Lazy:
        rows = slice(begin * hidden, end * hidden)
        return dense[:, rows] if weight == "w2" else dense[rows]

    experts: list[Lazy] = []
    for _ in range(how.copies):
        for shard in range(how.granularity):
            halved = 0.5 if weight == "w2" and shard < how.shared_experts else 1.0
            own = part(shard, shard + 1)
            change = partial(_scaled_and_noisy, own, factor * halved, how, f"{layer}.moe.experts.{weight}.{len(experts)}")
            experts.append(Lazy(own.shape, torch.float32, change))
    moe: dict[str, Parts] = {f"{layer}.moe.experts.{weight}": experts}
    if how.shared_experts:
        own = part(0, how.shared_experts)
        shared = partial(_scaled, own, 0.5 if weight == "w2" else 1.0)
        moe[f"{layer}.moe.shared_experts.{weight}.weight"] = Lazy(own.shape, torch.float32, shared)
    return moe


def _scaled(own: Lazy, factor: float) -> Tensor:
    return own.load().float() * factor


def _scaled_and_noisy(own: Lazy, factor: float, how: Upcycling, name: str) -> Tensor:
    scaled = _scaled(own, factor)
    if not how.noise:
        return scaled
    return scaled + how.noise * scaled.std() * _randn(scaled.shape, how.seed, name)


def _router(layer: str, args: Qwen3ModelArgs, how: Upcycling) -> dict[str, Parts]:
    def rows() -> Tensor:
        name = f"{layer}.moe.router.gate.weight"
        return (_ROUTER_STD * _randn((how.copies, args.dim), how.seed, name)).repeat_interleave(how.granularity, 0)

    experts = how.granularity * how.copies
    return {
        f"{layer}.moe.router.gate.weight": Lazy((experts, args.dim), torch.float32, rows),
        f"{layer}{BIAS}": Lazy((experts,), torch.float32, lambda: torch.zeros(experts)),
    }


def _randn(shape: Any, seed: int, name: str) -> Tensor:
    """Random numbers that depend on the seed and the tensor's name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
