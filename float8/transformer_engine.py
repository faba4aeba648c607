"""Transformer Engine's linear and grouped linear layers with our weights, for linear layers and for experts.

Their parameters stay ours, under the same names, and are lent to layers of Transformer Engine for each use. Those have no state
of their own in these recipes, which find all scales anew. Written for its version 2.20.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from float8.aligned_groups import AlignedGroups
from float8.shards import on_shards

RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Ours, and the classes of Transformer Engine in their default form: E4M3, for tensorwise gradients E5M2; power-of-two scales
where blockwise."""
PACKAGE = "transformer_engine"
TOKENS = 32
"""What the number of tokens of linear layers must be a multiple of."""
_UNIT = 128  # rows that the size of a group is a multiple of: more than any recipe asks for


@cache
def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    return getattr(recipe, RECIPES[name])()


class _Layer:
    """A layer of Transformer Engine without weights, made when it is first used."""

    def __init__(self, kind: str, recipe: str, *sizes: int):
        self.kind, self.recipe, self.sizes = kind, recipe, sizes
        self.module: nn.Module | None = None

    def __call__(self, weights: dict[str, Tensor], x: Tensor, *arguments: Any) -> Tensor:
        import transformer_engine.pytorch as te

        if self.module is None:
            self.module = getattr(te, self.kind)(*self.sizes, bias=False, params_dtype=torch.bfloat16, device=x.device)
        self.module._parameters.update(weights)
        try:
            with te.autocast(enabled=True, recipe=_recipe(self.recipe)):
                return self.module(x, *arguments)
        finally:  # Recomputation leaves a block by an exception once it has what it wants.
            self.module._parameters.update(dict.fromkeys(weights))


class TransformerEngineLinear(nn.Linear):
    """Takes over the parameters of ``linear``, which has no bias."""

    def __init__(self, linear: nn.Linear, recipe: str):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.recipe = recipe
        self._layers: dict[torch.Size, _Layer] = {}

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._product, input, self.weight)

    def _product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        N, K = weight_NK.shape
        layer = self._layers.setdefault(weight_NK.shape, _Layer("Linear", self.recipe, K, N))
        return layer({"weight": weight_NK}, x)


class TransformerEngineExperts:
    """Stands in for :func:`kernels.expert_mlp.expert_mlp`, with sizes of groups on the host, for which it waits."""

    def __init__(self, recipe: str):
        self.recipe = recipe
        self._layers: dict[torch.Size, _Layer] = {}

    def __call__(
        self,
        x_ND: Tensor,
        w13_E2FD: Tensor,
        w2_EDF: Tensor,
        weights_P: Tensor,
        pair_R: Tensor,
        row_NK: Tensor,
        offsets_E: Tensor,
        recompute: bool,
        *_: Any,
    ) -> Tensor:
        operands = x_ND, w13_E2FD, w2_EDF, weights_P, pair_R, row_NK.shape[1], offsets_E
        return checkpoint(self._mlp, *operands, use_reentrant=False) if recompute else self._mlp(*operands)

    def _mlp(
        self, x_ND: Tensor, w13: Tensor, w2_EDF: Tensor, weights_P: Tensor, pair_R: Tensor, choices: int, offsets_E: Tensor
    ) -> Tensor:
        groups = AlignedGroups.of(offsets_E, _UNIT)
        pair_r = pair_R[: groups.num_rows].long()
        gate_up_W2F = self._grouped(w13.flatten(1, 2), groups.place(x_ND[pair_r // choices]), groups.sizes)
        gate_WF, up_WF = gate_up_W2F.float().chunk(2, dim=1)
        weight_W = groups.place(weights_P[pair_r, None])
        act_WF = (nn.functional.silu(gate_WF) * up_WF * weight_W).to(x_ND.dtype)
        out_rD = groups.take(self._grouped(w2_EDF, act_WF, groups.sizes))
        return torch.cat((out_rD, out_rD.new_zeros(len(pair_R) - len(out_rD), out_rD.shape[1])))

    def _grouped(self, w_ENK: Tensor, x_WK: Tensor, sizes: list[int]) -> Tensor:
        E, N, K = w_ENK.shape
        layer = self._layers.setdefault(w_ENK.shape, _Layer("GroupedLinear", self.recipe, E, K, N))
        return layer({f"weight{expert}": w_NK for expert, w_NK in enumerate(w_ENK.unbind())}, x_WK, sizes)
