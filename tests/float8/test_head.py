"""The output projection in low precision: against its emulation, and against the loss of rounded operands in fp64."""

from functools import partial

import float8_reference
import numpy as np
import pytest
import torch
import torch.distributed as dist
from layout_runs import relative_error
from torch import Tensor

import float8.head
import kernels.cross_entropy
from float8.head import EmulatedHead, RowwiseHead
from float8.recipes import RECIPES
from kernels.cross_entropy import LogitsSlice, cross_entropy_backward_reference, linear_cross_entropy_sums

T, D, V, IGNORED = 33, 64, 176, -100
EMULATED = partial(EmulatedHead, recipe=RECIPES["rowwise"])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """One token that is sure of its label, one that is sure of another word, one with an outlier."""
    generator = torch.Generator().manual_seed(0)
    h_TD, weight_VD = torch.randn(T, D, generator=generator), torch.randn(V, D, generator=generator) / 4
    labels_T = torch.randint(V, (T,), generator=generator)
    labels_T[::5] = IGNORED
    h_TD[1], h_TD[2], h_TD[3, 7] = 4 * weight_VD[labels_T[1]], 4 * weight_VD[(labels_T[2] + 1) % V], 300
    return h_TD.bfloat16(), weight_VD.bfloat16(), labels_T


def run(products, ranks: int = 1, scales: tuple[float, ...] = (1.0,)) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients of this rank's part of the vocabulary."""
    h_TD, weight_VD, labels_T = inputs()
    rank, group = (dist.get_rank(), dist.group.WORLD) if ranks > 1 else (0, None)
    h_TD, weight_vD = h_TD.requires_grad_(), weight_VD.chunk(ranks)[rank].clone().requires_grad_()
    loss, _ = linear_cross_entropy_sums(h_TD, weight_vD, labels_T, IGNORED, scales, group, products)
    loss.backward()
    return loss.item(), h_TD.grad.float().numpy(), weight_vD.grad.float().numpy()


@pytest.mark.parametrize("logits_at_a_time", [1 << 29, 5 * V])
def test_equals_its_emulation(monkeypatch, logits_at_a_time) -> None:
    monkeypatch.setattr(kernels.cross_entropy, "_SLICE", logits_at_a_time)
    actual, expected = (run(products, scales=(0.5, 0.25, 1.0)) for products in (RowwiseHead, EMULATED))
    assert actual[0] == pytest.approx(expected[0], rel=1e-3)
    for mine, wanted in zip(actual[1:], expected[1:], strict=True):
        assert relative_error(mine, wanted) < 5e-3


def test_no_tokens() -> None:
    h_TD, weight_VD, labels_T = (each[:0] if i != 1 else each for i, each in enumerate(inputs()))
    h_TD, weight_VD = h_TD.requires_grad_(), weight_VD.requires_grad_()
    loss, _ = linear_cross_entropy_sums(h_TD, weight_VD, labels_T, IGNORED, (1.0,), None, RowwiseHead)
    loss.backward()
    assert loss == 0 and h_TD.grad.shape == (0, D) and weight_VD.grad.shape == (V, D) and not weight_VD.grad.any()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_rounds_as_the_recipe_says(recipe) -> None:
    """The loss and the gradients are those of operands rounded by the recipe, in fp64. For the weight's only ``rowwise`` rounds
    h, whose rows it turns, and the gradients of logits, to E5M2."""
    found = run(partial(EmulatedHead, recipe=RECIPES[recipe]))
    h_TD, weight_VD, labels_T = (each.double() if each.is_floating_point() else each for each in inputs())
    quantizers, trained_T = RECIPES[recipe], labels_T != IGNORED
    logits_TV = quantizers.input.simulate(h_TD, 1) @ quantizers.weight.simulate(weight_VD, 1).t()
    logits_TV = logits_TV.bfloat16().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
    [grad_TV] = torch.autograd.grad(loss, logits_TV)
    assert found[0] == pytest.approx(loss.item(), rel=1e-3)
    grad_h_TD = quantizers.grad.simulate(grad_TV.bfloat16().float(), 1).double() @ quantizers.weight.simulate(weight_VD, 0)
    # Stochastic rounding depends on the last bit of each number.
    assert relative_error(found[1], grad_h_TD.numpy()) < (6e-2 if quantizers.grad.stochastic else 5e-3)
    exact_VD = grad_TV.t() @ h_TD
    if recipe == "rowwise":
        rounded_TV = float8_reference.nearest(grad_TV.bfloat16().double().numpy() * 2**15, "e5m2") / 2**15
        rounded_VD = torch.from_numpy(rounded_TV).t() @ float8_reference.simulate_turned(h_TD, recipe, "input")
        assert relative_error(rounded_VD.numpy(), exact_VD.numpy()) < 6e-2
        exact_VD = rounded_VD
    assert relative_error(found[2], exact_VD.numpy()) < 5e-3
    assert not found[1][~trained_T].any()


def test_cut_vocabulary(pool) -> None:
    """Each rank has its own scales of a token's gradients, also where the label is another's."""
    whole = run(RowwiseHead)
    losses, grads_h, grads_weight = zip(*pool.run(2, run, RowwiseHead, 2), strict=True)
    for value in losses:
        assert value == pytest.approx(whole[0], rel=1e-3)
    assert relative_error(sum(grads_h), whole[1]) < 4e-2
    assert relative_error(np.concatenate(grads_weight), whole[2]) < 5e-3


def test_scales_are_those_of_the_largest(monkeypatch) -> None:
    """Found without looking at the gradients: bit for bit what quantising these gives, but for numbers that round at a tie."""
    kept = {}
    written = float8.head.cross_entropy_backward_fp8

    def keep(*arguments):
        kept["grad"] = cross_entropy_backward_reference(*arguments[:5])
        kept["elements"], kept["turned"] = written(*arguments)
        kept["factor"], kept["turned_factor"] = arguments[5:]
        return kept["elements"], kept["turned"]

    monkeypatch.setattr("float8.head.cross_entropy_backward_fp8", keep)
    run(RowwiseHead)
    expected = RECIPES["rowwise"].grad.quantize(kept["grad"], 1)
    trained_T = kept["grad"].any(1)
    assert torch.equal(1 / kept["factor"][trained_T], expected.scale[trained_T].flatten())
    assert torch.equal(kept["elements"].float(), expected.elements.float())
    assert kept["turned_factor"].item() == 2.0**15  # by which a probability of 1 fits E5M2
    assert 2.0**13 < kept["turned"].float().abs().max() < 57344


@pytest.mark.parametrize("size", [10.0, 30.0, 100.0])
def test_a_token_that_is_sure_of_its_label(size) -> None:
    """What fp32 leaves of 1 - p is nothing; the gradient of the one other word that counts is 8e-7."""
    logits_VV = torch.full((16, 16), -size).bfloat16()
    logits_VV.fill_diagonal_(size)
    logits_VV[0, 1] = size - 14
    labels_T = torch.arange(16)
    lse_T = logits_VV.float().logsumexp(1)
    part = LogitsSlice(logits_VV, labels_T, lse_T, logits_VV.float().amax(1), torch.ones(16), 0)
    expected_D = logits_VV[:1].double().softmax(1) - torch.eye(16, dtype=torch.float64)[:1]
    found_D, _ = RowwiseHead(torch.eye(16).bfloat16()).grads(torch.ones(16, 16).bfloat16(), part, None, torch.bfloat16)
    assert found_D[0, 1].item() == pytest.approx(expected_D[0, 1].item(), rel=0.1)
