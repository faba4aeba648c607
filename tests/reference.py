"""Training in one process from first principles: torchtitan's model in fp64 with a MoE layer of loops over tokens.

Shares no line with what it checks beyond torchtitan's attention, norms and embeddings.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mtp_reference import add_predictions, cross_entropy_sums
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model

from moe_titan.data import MicroBatch
from moe_titan.engine import TrainOptions

CLASSES = {"llama3": Transformer, "qwen3": Qwen3Model, "deepseek_v3": DeepSeekV3Model}


def largest(values: list[float], k: int) -> list[int]:
    """Indices of the k largest, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def choose_experts(scores: list[float], bias: list[float], args) -> list[int]:
    """The experts of one token."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    if args.num_expert_groups is not None:
        size = args.num_experts // args.num_expert_groups
        groups = [choice[start : start + size] for start in range(0, args.num_experts, size)]
        kept = largest([sum(sorted(group)[-2:]) for group in groups], args.num_limited_groups)
        choice = [c if e // size in kept else float("-inf") for e, c in enumerate(choice)]
    return largest(choice, args.top_k)


class NaiveMoE(nn.Module):
    """One token after the other, one expert after the other."""

    def __init__(self, args, dim: int, hidden_dim: int):
        super().__init__()
        self.args = args
        self.router, self.experts = nn.Module(), nn.Module()
        self.router.gate = nn.Linear(dim, args.num_experts, bias=args.gate_bias)
        self.experts.w1 = nn.Parameter(torch.empty(args.num_experts, hidden_dim, dim))
        self.experts.w2 = nn.Parameter(torch.empty(args.num_experts, dim, hidden_dim))
        self.experts.w3 = nn.Parameter(torch.empty(args.num_experts, hidden_dim, dim))
        self.shared_experts = None
        if args.num_shared_experts:
            shared = hidden_dim * args.num_shared_experts
            self.shared_experts = nn.ModuleDict(
                {
                    "w1": nn.Linear(dim, shared, bias=False),
                    "w2": nn.Linear(shared, dim, bias=False),
                    "w3": nn.Linear(dim, shared, bias=False),
                }
            )
        self.register_buffer("expert_bias", torch.zeros(args.num_experts))
        self.valid_BS: Tensor | None = None
        self.load = [0] * args.num_experts
        self.balance: list[tuple[Tensor, list[int], int]] = []

    def forward(self, x_BSD: Tensor) -> Tensor:
        self.balance = []
        return torch.stack([self._sequence(b, x_SD) for b, x_SD in enumerate(x_BSD)])

    def _sequence(self, b: int, x_SD: Tensor) -> Tensor:
        args, outputs = self.args, []
        probability, counts, tokens = torch.zeros(args.num_experts), [0] * args.num_experts, 0
        for s, x in enumerate(x_SD):
            y = torch.zeros_like(x)
            if self.shared_experts is not None:
                w1, w2, w3 = (self.shared_experts[name].weight for name in ("w1", "w2", "w3"))
                y = w2 @ (F.silu(w1 @ x) * (w3 @ x))
            if self.valid_BS is None or self.valid_BS[b, s]:
                logits = self.router.gate(x)
                scores = logits.softmax(0) if args.score_func == "softmax" else logits.sigmoid()
                experts = choose_experts(scores.tolist(), self.expert_bias.tolist(), args)
                total = sum(scores[e] for e in experts) if args.route_norm else 1.0
                for e in experts:
                    act = F.silu(self.experts.w1[e] @ x) * (self.experts.w3[e] @ x)
                    y = y + args.route_scale * scores[e] / total * (self.experts.w2[e] @ act)
                    self.load[e] += 1
                probability = probability + scores / scores.sum()
                for e in largest(scores.tolist(), args.top_k):
                    counts[e] += 1
                tokens += 1
            outputs.append(y)
        self.balance.append((probability, counts, tokens))
        return torch.stack(outputs)

    def balance_loss(self, options: TrainOptions) -> Tensor:
        """coeff * E / (K n) * sum_e c_e * mean_t P_te, times the n tokens that it is a mean over."""
        E, K = self.args.num_experts, self.args.top_k
        loss = torch.zeros(())
        for probability, counts, n in self.balance:
            for e in range(E):
                if n:
                    loss = loss + options.sequence_balance_coeff * E / (K * n) * counts[e] * probability[e] / n * n
        n = sum(tokens for _, _, tokens in self.balance)
        for e in range(E):
            if n:
                count = sum(counts[e] for _, counts, _ in self.balance)
                probability = sum(probability[e] for probability, _, _ in self.balance)
                loss = loss + options.batch_balance_coeff * E / (K * n) * count * probability / n * n
        return loss


def train_reference(
    model, initial: dict, initial_bias: dict, steps: list[list[MicroBatch]], options: TrainOptions, lr: float = 1e-3
) -> dict[str, Any]:
    """Trains on the micro-batches of each step. Returns what :func:`layout_runs.train` returns on rank 0."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train(model, initial, initial_bias, steps, options, lr)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(model, initial, initial_bias, steps, options, lr) -> dict[str, Any]:
    name, args = model
    net = CLASSES[name](args)
    layers: dict[str, NaiveMoE] = {}
    for index, block in net.layers.items():
        if getattr(block, "moe_enabled", False):
            block.moe = layers[f"layers.{index}"] = NaiveMoE(args.moe_args, args.dim, args.moe_inter_dim)
    for depth, block in enumerate(add_predictions(net, args, options.mtp_layers)):
        if getattr(block, "moe_enabled", False):
            block.moe = layers[f"mtp_layers.{depth}"] = NaiveMoE(args.moe_args, args.dim, args.moe_inter_dim)
    net.init_weights = None
    _load(net, initial, initial_bias)
    adam = torch.optim.AdamW(
        net.parameters(), lr=lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, foreach=False
    )
    out: dict[str, Any] = {"loss": [], "norm": [], "tokens": [], "balance": [], "mtp": [], "load": [], "grads": []}
    for batches in steps:
        trained = sum(int((labels != -100).sum()) for _, labels, _ in batches)
        total_loss = total_balance = total_mtp = 0.0
        for tokens, labels, valid in batches:
            loss, *further = (each / trained for each in cross_entropy_sums(net, tokens, labels, valid, options.eos_id))
            mtp = sum(further) / max(len(further), 1)
            balance = sum((moe.balance_loss(options) for moe in layers.values()), torch.zeros(())) / trained
            (loss + options.mtp_loss_scale * mtp + balance).backward()
            total_loss += float(loss.detach())
            total_balance += float(balance.detach())
            total_mtp += float(mtp.detach()) if further else 0.0
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}
        out["grads"].append({n: grad.numpy().copy() for n, grad in grads.items()})
        for n, p in net.named_parameters():
            p.grad = grads[n]
        out["norm"].append(float(nn.utils.clip_grad_norm_(net.parameters(), options.max_norm)))
        adam.step()
        adam.zero_grad()
        out["loss"].append(total_loss)
        out["tokens"].append(trained)
        balanced = options.sequence_balance_coeff or options.batch_balance_coeff
        out["balance"].append(total_balance if balanced else None)
        out["mtp"].append(total_mtp if options.mtp_layers else None)
        out["load"].append({layer: moe.load for layer, moe in layers.items()})
        for moe in layers.values():
            _update_bias(moe)
    out["params"] = {n: p.detach().numpy() for n, p in net.named_parameters()}
    out["bias"] = {f"{layer}.moe.expert_bias": moe.expert_bias.numpy() for layer, moe in layers.items()}
    return out


def _update_bias(moe: NaiveMoE) -> None:
    mean = sum(moe.load) / len(moe.load)
    direction = torch.tensor([float((load < mean) - (load > mean)) for load in moe.load])
    moe.expert_bias += moe.args.load_balance_coeff * (direction - direction.mean())
    moe.load = [0] * len(moe.load)


@torch.no_grad()
def _load(net: nn.Module, initial: dict[str, np.ndarray], initial_bias: dict[str, np.ndarray]) -> None:
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    assert parameters.keys() == initial.keys()
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(initial[name]))
    for name, bias in initial_bias.items():
        buffers[name].copy_(torch.from_numpy(bias))
