"""Multi-token prediction from first principles: each depth on its own prefix of a sequence, each document on its own."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def add_predictions(net: nn.Module, args, depths: int) -> list[nn.Module]:
    """Gives a torchtitan model blocks for so many depths, and returns them."""
    last = len(net.layers) - 1
    predictions = [type(net.layers[str(last)])(last, args) for _ in range(depths)]
    for block in predictions:
        block.enorm, block.hnorm, block.mtp_norm = (nn.RMSNorm(args.dim, eps=args.norm_eps) for _ in range(3))
        block.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
    if predictions:
        net.mtp_layers = nn.ModuleList(predictions)
    return predictions


def cross_entropy_sums(net, tokens_BS: Tensor, labels_BS: Tensor, valid_BS: Tensor | None, eos_id: int) -> list[Tensor]:
    """Of the next token, and of each depth's."""
    if net.model_args.attn_mask_type != "block_causal":
        return _sums(net, tokens_BS, labels_BS, valid_BS, None)
    documents = [part for row in zip(tokens_BS, labels_BS, strict=True) for part in _documents(*row, eos_id)]
    every = [_sums(net, tokens[None], labels[None], None, eos_id) for tokens, labels in documents]
    return [sum(depth) for depth in zip(*every, strict=True)]


def _documents(tokens_S: Tensor, labels_S: Tensor, eos_id: int) -> Iterator[tuple[Tensor, Tensor]]:
    begin = 0
    for end, token in enumerate(tokens_S.tolist(), 1):
        if token == eos_id or end == len(tokens_S):
            yield tokens_S[begin:end], labels_S[begin:end]
            begin = end


def _sums(net: nn.Module, tokens_BS: Tensor, labels_BS: Tensor, valid_BS: Tensor | None, eos_id: int | None) -> list[Tensor]:
    rope = net.rope_cache if hasattr(net, "rope_cache") else net.freqs_cis
    h_BSD = net.tok_embeddings(tokens_BS)
    for block in net.layers.values():
        h_BSD = _run(block, h_BSD, rope, valid_BS)
    h_BSD = net.norm(h_BSD)
    sums = [F.cross_entropy(net.output(h_BSD).flatten(0, 1), labels_BS.flatten(), ignore_index=-100, reduction="sum")]
    for depth, block in enumerate(getattr(net, "mtp_layers", ()), 1):
        if depth >= tokens_BS.shape[1]:
            sums.append(0 * sums[0])
            continue
        token_BSD = block.enorm(net.tok_embeddings(tokens_BS[:, depth:]))
        h_BSD = block.eh_proj(torch.cat((token_BSD, block.hnorm(h_BSD[:, : tokens_BS.shape[1] - depth])), -1))
        valid = None if valid_BS is None else valid_BS[:, depth:] & valid_BS[:, :-depth]
        h_BSD = block.mtp_norm(_run(block, h_BSD, rope, valid))
        total = torch.zeros(())
        for b, row in enumerate(labels_BS[:, depth:].tolist()):
            for s, label in enumerate(row):
                if label != -100 and (eos_id is None or tokens_BS[b, s + depth] != eos_id):
                    total = total - net.output(h_BSD[b, s]).log_softmax(0)[label]
        sums.append(total)
    return sums


def _run(block: nn.Module, x_BSD: Tensor, rope: Tensor, valid_BS: Tensor | None) -> Tensor:
    if getattr(block, "moe_enabled", False):
        block.moe.valid_BS = valid_BS
    return block(x_BSD, rope, None)
