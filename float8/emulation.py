"""Emulated low-precision products: operands rounded as a recipe says, multiplied in fp32 on any machine."""

import torch
from torch import Tensor, nn

from float8.recipes import Recipe, rotate_rows, turned_rows
from float8.shards import on_shards


def output(recipe: Recipe, x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """``x @ weight^T`` [R, N] in x's dtype; in this and the other products R is at least 1."""
    return (recipe.input.simulate(x_RK, 1) @ recipe.weight.simulate(weight_NK, 1).t()).to(x_RK.dtype)


def input_grad(recipe: Recipe, grad_RN: Tensor, weight_NK: Tensor) -> Tensor:
    """``grad @ weight`` [R, K] in grad's dtype."""
    return (recipe.grad.simulate(grad_RN, 1) @ recipe.weight.simulate(weight_NK, 0)).to(grad_RN.dtype)


def weight_grad(recipe: Recipe, grad_RN: Tensor, x_RK: Tensor) -> Tensor:
    """``grad^T @ x`` [N, K] in x's dtype."""
    dtype = x_RK.dtype
    if recipe.turns_rows:
        return (turned_rows(recipe.grad, grad_RN).t() @ turned_rows(recipe.input, x_RK)).to(dtype)
    if recipe.hadamard:
        grad_RN, x_RK = rotate_rows(grad_RN), rotate_rows(x_RK)
    return (recipe.grad.simulate(grad_RN, 0).t() @ recipe.input.simulate(x_RK, 0)).to(dtype)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, weight_NK, recipe):
        ctx.save_for_backward(x_RK, weight_NK)
        ctx.recipe = recipe
        return output(recipe, x_RK, weight_NK)

    @staticmethod
    def backward(ctx, grad_RN):
        x_RK, weight_NK = ctx.saved_tensors
        return input_grad(ctx.recipe, grad_RN, weight_NK), weight_grad(ctx.recipe, grad_RN, x_RK), None


class EmulatedLinear(nn.Linear):
    """A linear layer whose three products are emulated; takes over the parameters of ``linear``, which has no bias."""

    def __init__(self, linear: nn.Linear, recipe: Recipe):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.recipe = recipe

    @torch.compiler.disable  # torch 2.11 compiles the function above into one without a gradient
    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._product, input, self.weight)

    def _product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        return _EmulatedLinear.apply(x.flatten(0, -2), weight_NK, self.recipe).unflatten(0, x.shape[:-1])
