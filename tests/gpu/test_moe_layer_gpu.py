"""The whole layer on one GPU: numbers, launches, waiting, CUDA graphs, compilation and memory."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks import moe_layer
from benchmarks.moe_layer import Shape
from kernels.expert_mlp import expert_mlp
from kernels.permute import gather_sum, spread_rows, unpermute
from kernels.route import COUNTED_TOKENS, RouteOptions, route
from kernels.sort import sort_pairs
from kernels.swiglu import weighted_swiglu, weighted_swiglu_backward
from moe_titan.layers.moe import MoE
from parallelisms.compile import apply_compile

DEVICE = "cuda"
USUAL = Shape(D=256, F=128, E=16, K=4, T=1000)
SHAPES = [
    USUAL,
    Shape(D=192, F=72, E=6, K=1, T=1),
    Shape(D=72, F=40, E=20, K=3, T=333),
    Shape(D=128, F=136, E=160, K=6, T=515),
    Shape(D=512, F=256, E=256, K=8, T=2048),
]


def build(shape: Shape = USUAL) -> tuple[MoE, Tensor, Tensor]:
    return moe_layer.build(shape, DEVICE)


def other_inputs(x: Tensor) -> list[Tensor]:
    """Random tokens, others, and a token over and over, which leaves most experts empty."""
    return [torch.randn_like(x), torch.randn_like(x), x.detach()[:, :1].expand_as(x).contiguous()]


@pytest.mark.parametrize("skew", [None, *moe_layer.SKEWS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_against_fp64(poisoned, shape, skew) -> None:
    layer, x, grad = build(shape)
    if skew is not None:
        moe_layer.SKEWS[skew](layer, x)
    assert moe_layer.router_agreement(layer, x) > 0.999
    errors = poisoned(moe_layer.errors_against_fp64, layer, x, grad)
    if shape.K == 1:
        del errors["gate"]  # A single weight, normalised, is one whatever the gate says.
    assert not {name: error for name, error in errors.items() if not error < 1e-2}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_runs_repeat_bitwise(shape) -> None:
    assert moe_layer.repeats_bitwise(*build(shape))


def test_launches() -> None:
    layer, x, grad = build()
    moe_layer.gradients(layer, x, grad)
    y = layer(x)
    forward, backward = moe_layer.kernels_of(lambda: layer(x)), moe_layer.kernels_of(lambda: y.backward(grad))
    assert 0 < len(forward) <= 10, forward
    assert 0 < len(backward) <= 18, backward


def test_host_never_waits() -> None:
    layer, x, grad = build()
    moe_layer.gradients(layer, x, grad)
    assert moe_layer.waits_for_device(layer, x, grad) is None


def test_graph_replays_with_changing_routing() -> None:
    layer, x, grad = build()
    inputs = [x, *other_inputs(x)]
    assert len({tuple(moe_layer.chosen_experts(layer, each).flatten().tolist()) for each in inputs}) == len(inputs)
    assert moe_layer.replays_like_eager(layer, inputs, grad)


def test_saved_bytes() -> None:
    layer, x, grad = build()
    moe_layer.gradients(layer, x, grad)
    # The allocator deals in pieces of 512 bytes.
    assert moe_layer.memory(layer, x, grad)[0] == pytest.approx(USUAL.saved_bytes(), abs=16 * 512)


class Block(nn.Module):
    moe_enabled = True

    def __init__(self, moe: MoE):
        super().__init__()
        self.norm = nn.RMSNorm(USUAL.D, device=DEVICE, dtype=torch.bfloat16)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def test_steps_of_a_compiled_block() -> None:
    """Over 20 steps of different routing nothing is compiled again, and the peak of memory stays where it was."""
    moe, x, grad = build()
    eager = Block(moe)
    expected = moe_layer.gradients(eager, x, grad)
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Block(moe)})
    apply_compile(model, "inductor")
    block = model.layers["0"]
    for actual, wanted in zip(moe_layer.gradients(block, x, grad), expected, strict=True):
        assert moe_layer.relative_error(actual, wanted) < 1e-2
    peaks, graphs = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for step in range(20):
        with torch.no_grad():
            x.copy_(other_inputs(x)[step % 3])
        torch.cuda.reset_peak_memory_stats()
        block(x).backward(grad)
        for tensor in (x, *block.parameters()):
            tensor.grad = None
        peaks.append(torch.cuda.max_memory_allocated())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert max(peaks) <= 1.001 * min(peaks), peaks


OPTIONS = RouteOptions(USUAL.K, True, True, 1.0)


def routed(x_TD: Tensor, gate_ED: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The layer's ops one after the other, as a function that a compiler can look into."""
    experts_TK, weights_TK, _, counts = route(x_TD, gate_ED, OPTIONS)
    pair_R, row_P, _, ends_E = sort_pairs(experts_TK.flatten(), len(gate_ED), counts, COUNTED_TOKENS * OPTIONS.top_k)
    row_TK = row_P.view_as(experts_TK)
    return unpermute(expert_mlp(x_TD, w13, w2, weights_TK.flatten(), pair_R, row_TK, ends_E), row_TK)


def test_ops_compile_into_one_graph() -> None:
    layer, x, grad = build()
    inputs = [x.detach()[0].requires_grad_(), *layer.parameters()]
    results = []
    for function in (routed, torch.compile(routed, backend="aot_eager", fullgraph=True)):
        y_TD = function(*inputs)
        results.append((y_TD, *torch.autograd.grad(y_TD, inputs, grad[0])))
    assert torch.equal(results[0][0], results[1][0])
    # Scores that nothing used have zeros for a gradient in a compiled graph and none outside, which rounds otherwise.
    assert all(moe_layer.relative_error(actual, wanted) < 1e-3 for actual, wanted in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ops_are_registered_correctly(dtype) -> None:
    with torch.device(DEVICE):
        x_TD, gate_ED, row_TK = torch.randn(8, 16, dtype=dtype), torch.randn(6, 16), torch.randperm(16).int().view(8, 2)
        # No row past the last: those are unspecified, and opcheck compares all.
        gate_up_R2F, weights_P = torch.randn(4, 2, 24, dtype=dtype), torch.rand(8)
        index = (torch.tensor([6, 0, 3, 7], dtype=torch.int32), torch.tensor([4], dtype=torch.int32))
        key_P, grad_RF = torch.tensor([2, 0, 3, 2, 1]), torch.randn(4, 24, dtype=dtype)
        biases = torch.randn(6), torch.randn(6), torch.rand(8) < 0.7
    torch.library.opcheck(spread_rows, (x_TD, row_TK, 16))
    torch.library.opcheck(gather_sum, (x_TD, row_TK % 8))
    torch.library.opcheck(torch.ops.moe_titan.sort_pairs.default, (key_P, 3, None, 0))
    torch.library.opcheck(weighted_swiglu_backward, (grad_RF, gate_up_R2F, weights_P, *index))
    torch.library.opcheck(weighted_swiglu, (gate_up_R2F.requires_grad_(), weights_P.requires_grad_(), *index))
    for optional in ((None, None, None), biases):
        arguments = (x_TD, gate_ED, *optional, None, 2, True, True, 1.5, 0, 0)
        torch.library.opcheck(torch.ops.moe_titan.route.default, arguments)
