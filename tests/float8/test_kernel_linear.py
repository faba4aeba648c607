"""FP8 linear layers in the experts' kernels beside their emulation, alone and as torch.compile sees them."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layout_runs import relative_error
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from float8.emulation import EmulatedLinear
from float8.kernel_linear import KernelLinear
from float8.recipes import RECIPES


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, layer.weight], grad)]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_large_token_harms_no_other(recipe) -> None:
    """But in its row and column of the weight gradient: the rest has the error of the recipe, as rows differ in size anyway."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    x, grad = torch.randn(300, 256) * 2.0 ** torch.randint(-3, 4, (300, 1)), torch.randn(300, 384)
    x[0], grad[0] = 0, 0
    x[0, 7], grad[0, 9] = 2.0**16, 2.0**8
    results = [
        gradients(layer, x.bfloat16(), grad.bfloat16())[2] for layer in (KernelLinear(linear, recipe == "blockwise"), linear)
    ]
    found, exact = (torch.cat((y[:9], y[10:])).float() for y in results)
    found, exact = (torch.cat((y[:, :7], y[:, 8:]), 1).numpy() for y in (found, exact))
    assert relative_error(found, exact) < 5e-2


@pytest.mark.parametrize("blockwise", [False, True])
def test_no_rows(blockwise) -> None:
    layer = KernelLinear(nn.Linear(256, 384, bias=False, dtype=torch.bfloat16), blockwise)
    y, grad_x, grad_weight = gradients(layer, torch.zeros(0, 256).bfloat16(), torch.zeros(0, 384).bfloat16())
    assert y.shape == (0, 384) and grad_x.shape == (0, 256) and grad_weight.shape == (384, 256) and not grad_weight.any()


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


def test_layers_share_a_quantised_input() -> None:
    """Compiled, its rows are quantised once, and its columns."""
    layers = nn.ModuleList(KernelLinear(nn.Linear(256, 128, bias=False, dtype=torch.bfloat16), True) for _ in range(3))
    graphs = []

    def keep(graph: torch.fx.GraphModule, _) -> torch.fx.GraphModule:
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(5, 256).bfloat16().requires_grad_()
    torch.compile(lambda x: sum(layer(x) for layer in layers), backend=backend, fullgraph=True)(x).sum().backward()
    forward, backward = graphs
    assert forward.count("moe_titan.quantize_rows") == 1 and forward.count("moe_titan.grouped_mm_fp8.") == 3
    # All three have the same gradient here.
    assert backward.count("moe_titan.quantize_columns") == 2 and backward.count("moe_titan.grouped_mm_fp8.") == 3
