"""Gradients of w13 made during a dispatch's backward: when they are made, and that they are the same."""

import pytest
import tiny
import torch
from torch import Tensor, nn

from kernels.expert_mlp import Products, TokenRows
from moe_titan.layers.moe import MoE
from parallelisms.deferred import Deferred
from parallelisms.dispatch.base import Meanwhile
from parallelisms.dispatch.local import LocalDispatcher
from parallelisms.routing import RoutedTokens, Routing


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, meanwhile: Meanwhile | None, log: list[str]) -> Tensor:
        ctx.meanwhile, ctx.log = meanwhile, log
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.log.append("sent")
        if ctx.meanwhile is not None:
            ctx.meanwhile()
        ctx.log.append("arrived")
        return grad, None, None


class Dispatcher(LocalDispatcher):
    def __init__(self, calls: bool):
        self.calls, self.log = calls, []

    def dispatch(self, x_TD: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> tuple[RoutedTokens, RoutedTokens]:
        return super().dispatch(_Travel.apply(x_TD, meanwhile if self.calls else None, self.log), routing)


class LoggingProducts(Products):
    def __init__(self, log: list[str]):
        self.log = log

    def weight_grad(self, grad_RN: Tensor, x_RK: Tensor | TokenRows, offsets_E: Tensor) -> Tensor:
        self.log.append("w13" if isinstance(x_RK, TokenRows) else "w2")
        return super().weight_grad(grad_RN, x_RK, offsets_E)


def layer_gradients(calls: bool, defers: bool) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    _, args = tiny.qwen3(num_experts=6)
    layer = MoE(args.moe_args, 16, 24, layer="layers.0")
    with torch.no_grad():
        layer.init_weights(0.5, torch.device("cpu"))
    layer.dispatcher = dispatcher = Dispatcher(calls)
    layer.experts.products = LoggingProducts(dispatcher.log)
    if not defers:
        layer.experts.defer = lambda: None
    layer.router.register_full_backward_hook(lambda *_: dispatcher.log.append("router"))
    x_BSD = torch.randn(3, 5, 16, requires_grad=True)
    layer(x_BSD).square().sum().backward()
    return [x_BSD.grad, *(parameter.grad for parameter in layer.parameters())], dispatcher.log


def test_order() -> None:
    assert layer_gradients(calls=True, defers=True)[1] == ["w2", "sent", "w13", "arrived", "router"]
    assert layer_gradients(calls=False, defers=True)[1] == ["w2", "sent", "arrived", "w13", "router"]
    assert layer_gradients(calls=False, defers=False)[1] == ["w2", "w13", "sent", "arrived", "router"]


def test_gradients_are_the_same() -> None:
    expected, _ = layer_gradients(calls=False, defers=False)
    for calls in (True, False):
        actual, _ = layer_gradients(calls, defers=True)
        assert all(map(torch.equal, actual, expected))


def test_a_gradient_is_made_once_in_each_backward_pass() -> None:
    weight, made = nn.Parameter(torch.ones(3)), []

    def compute() -> Tensor:
        made.append(1)
        return torch.full((3,), 5.0)

    deferred = Deferred()
    y = deferred.hold(weight).sum()
    for passes in (1, 2):
        deferred.put_off(compute)
        deferred.run()
        deferred.run()
        y.backward(retain_graph=True)
        assert len(made) == passes and torch.equal(weight.grad, torch.full((3,), 5.0 * passes))


def test_without_a_gradient_to_take_backward_fails() -> None:
    y = Deferred().hold(nn.Parameter(torch.ones(3))).sum()
    with pytest.raises(AssertionError):
        y.backward()
