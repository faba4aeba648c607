"""Modules that predict tokens further on than the next: multi-token prediction (arXiv 2412.19437, 2.2).

The module of depth k takes, at each position, what the output head sees of depth k - 1 and the embedding of the token k further
on. From what it gives, the same head predicts the token after that one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols.model import AttentionMasksType, BaseModelArgs

from parallelisms.routing import active_tape
from parallelisms.tensor_parallel import own_copy


class Further(NamedTuple):
    """What the module of one depth is given: the tokens so much further on, and which of this rank's positions have one."""

    tokens_BS: Tensor
    valid_T: Tensor


class JoinedProjection(nn.Linear):
    """[..., 2 D] to [..., D] on this rank's tokens alone: no communication under tensor parallelism."""

    def __init__(self, dim: int):
        super().__init__(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, own_copy(self.weight))


class PredictingBlock(nn.Module):
    """Mixed into a torchtitan block. Names and order of the projection's inputs are torchtitan 0.3.0's and DeepSeek's."""

    def __init__(self, layer_id: int, args: BaseModelArgs):
        super().__init__(layer_id, args)
        self.enorm, self.hnorm, self.mtp_norm = (nn.RMSNorm(args.dim, eps=args.norm_eps) for _ in range(3))
        self.eh_proj = JoinedProjection(args.dim)

    def init_weights(self, buffer_device: torch.device) -> None:
        # llama3's blocks, which have no experts and no buffers, take no device.
        super().init_weights(*((buffer_device,) if hasattr(self, "moe_enabled") else ()))
        for norm in (self.enorm, self.hnorm, self.mtp_norm):
            norm.reset_parameters()
        trunc_normal_(self.eh_proj.weight, std=0.02)

    def forward(self, token_BSD: Tensor, h_BSD: Tensor, rope: Tensor, attention_masks: AttentionMasksType | None) -> Tensor:
        """
        Args:
            token_BSD: embeddings of the tokens further on.
            h_BSD: what the head sees of the depth before.
        Returns:
            What the head is to see of this depth.
        """
        x_BSD = self.eh_proj(torch.cat((self.enorm(token_BSD), self.hnorm(h_BSD)), -1))
        return self.mtp_norm(super().forward(x_BSD, rope, attention_masks))


class PredictingModel(nn.Module):
    """Mixed into a torchtitan model. Embedding and head run once for all depths, which they see as so many more samples."""

    def __init__(self, args: BaseModelArgs, depths: int):
        super().__init__(args)
        last = len(self.layers) - 1
        block = type("PredictingBlock", (PredictingBlock, type(self.layers[str(last)])), {})
        self.mtp_layers = nn.ModuleList(block(last, args) for _ in range(depths))

    def init_weights(self, buffer_device: torch.device) -> None:
        super().init_weights(buffer_device)
        for block in self.mtp_layers:
            block.init_weights(buffer_device)

    def forward(
        self, tokens_BS: Tensor, attention_masks: AttentionMasksType | None = None, further: Sequence[Further] = ()
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or what the head has been told to give, of the next token and of those of the depths in ``further``."""
        h_BSD, *tokens_BSD = self.tok_embeddings(torch.cat((tokens_BS, *(f.tokens_BS for f in further)))).chunk(1 + len(further))
        rope = self.rope_cache if hasattr(self, "rope_cache") else self.freqs_cis
        for block in self.layers.values():
            h_BSD = block(h_BSD, rope, attention_masks)
        seen = [self.norm(h_BSD)]
        for block, token_BSD, (_, valid_T) in zip(self.mtp_layers, tokens_BSD, further, strict=False):
            with active_tape().narrowed(valid_T):
                seen.append(block(token_BSD, seen[-1], rope, attention_masks))
        return self.output(torch.cat(seen))


def predicting(model: type[nn.Module]) -> type[PredictingModel]:
    """The class of torchtitan's ``model`` with modules that predict further tokens."""
    return type(f"Predicting{model.__name__}", (PredictingModel, model), {})
