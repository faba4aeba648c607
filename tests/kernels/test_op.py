"""Operators as :func:`kernels.op.op` registers them."""

import pytest
import torch
from torch import Tensor

from kernels.op import op


@op("test_doubled")
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@op("test_triple_", mutates_args=("x", "y"))
def triple_(x: Tensor, y: Tensor | None, factor: float = 3.0) -> None:
    for tensor in (x, y):
        if tensor is not None:
            tensor.detach().numpy()[...] *= factor  # behind autograd's back, as a kernel does


def test_a_reference_is_no_more_differentiable_than_a_kernel() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        (doubled(x) * weight).sum().backward()
    assert x.grad is None and weight.grad.tolist() == [2, 2]


@pytest.mark.parametrize("both", [False, True])
def test_autograd_notices_what_is_overwritten(both) -> None:
    x = torch.ones(2, requires_grad=True)
    saved = x * 2
    y = saved * saved
    with torch.no_grad():
        triple_(torch.ones(2) if both else saved, saved if both else None)
    assert saved.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        triple_(x, None, 2.0)
        return x.sin()

    x = torch.rand(3)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
