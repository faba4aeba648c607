"""FP8 linear layers in the experts' kernels beside their emulation, alone and as torch.compile sees them."""

import pytest
import torch
from layout_runs import relative_error
from torch import Tensor, nn

from float8.emulation import EmulatedLinear
from float8.kernel_linear import KernelLinear, fp8_linear, fp8_linear_backward
from float8.recipes import RECIPES


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, layer.weight], grad)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("rows", [(1,), (3, 43), (2, 2, 64)])
def test_equals_its_emulation(rows, recipe, compiled) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    x, grad = torch.randn(*rows, 256).bfloat16(), torch.randn(*rows, 384).bfloat16()
    x.view(-1, 256)[0, 3] = 30
    layer = KernelLinear(linear, recipe == "blockwise")
    assert layer.weight is linear.weight
    found = gradients(torch.compile(layer, backend="aot_eager") if compiled else layer, x, grad)
    for actual, expected in zip(found, gradients(EmulatedLinear(linear, RECIPES[recipe]), x, grad), strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert relative_error(actual.float().numpy(), expected.float().numpy()) < 2e-3
    errors = [
        relative_error(a.float().numpy(), b.float().numpy()) for a, b in zip(found, gradients(linear, x, grad), strict=True)
    ]
    assert errors[0] > 1e-3 and max(errors) < 5e-2  # a weight gradient of one row has a scale for each of its numbers


def test_ops_are_registered_correctly() -> None:
    x, w, grad = torch.randn(5, 128).bfloat16(), torch.randn(256, 128).bfloat16(), torch.randn(5, 256).bfloat16()
    for blockwise in (False, True):
        torch.library.opcheck(fp8_linear, (x.requires_grad_(), w.requires_grad_(), blockwise))
        torch.library.opcheck(fp8_linear_backward, (grad, x.detach(), w.detach(), blockwise))
