"""Cross-entropy over whole and cut vocabularies against PyTorch's, in fp64 and on a group of ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import kernels.cross_entropy
from kernels.cross_entropy import (
    cross_entropy_backward_,
    linear_cross_entropy_sums,
    partial_cross_entropy,
)

T, D, V, IGNORED = 9, 8, 12, -100


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    h_TD, weight_VD = (torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype) for n in (T, V))
    labels_T = torch.randint(0, V, (T,), generator=generator)
    labels_T[::4] = IGNORED
    return 3 * h_TD, weight_VD, labels_T


def expected(dtype: torch.dtype) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and the gradients of three times the loss, in fp64."""
    h_TD, weight_VD, labels_T = inputs(dtype)
    h_TD, weight_VD = h_TD.double().requires_grad_(), weight_VD.double().requires_grad_()
    loss = F.cross_entropy(h_TD @ weight_VD.t(), labels_T, ignore_index=IGNORED, reduction="sum")
    (3 * loss).backward()
    return loss.item(), h_TD.grad.numpy(), weight_VD.grad.numpy()


def run(dtype: torch.dtype, rank: int, ranks: int, group) -> tuple[float, np.ndarray, np.ndarray, str]:
    h_TD, weight_VD, labels_T = inputs(dtype)
    h_TD.requires_grad_()
    weight_vD = weight_VD.chunk(ranks)[rank].clone().requires_grad_()
    loss, _ = linear_cross_entropy_sums(h_TD, weight_vD, labels_T, IGNORED, (1.0,), group)
    (3 * loss).backward()
    return loss.item(), h_TD.grad.double().numpy(), weight_vD.grad.double().numpy(), str(loss.dtype)


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    return np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)


CASES = [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize("logits_at_a_time", [1 << 29, 5 * V, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
def test_whole_vocabulary(monkeypatch, dtype, tolerance, logits_at_a_time) -> None:
    monkeypatch.setattr(kernels.cross_entropy, "_SLICE", logits_at_a_time)
    loss, grad_h, grad_weight = expected(dtype)
    value, actual_h, actual_weight, loss_dtype = run(dtype, 0, 1, None)
    assert value == pytest.approx(loss, rel=tolerance)
    assert relative_error(actual_h, grad_h) < tolerance and relative_error(actual_weight, grad_weight) < tolerance
    assert loss_dtype == ("torch.float64" if dtype == torch.float64 else "torch.float32")


def _cut(dtype: torch.dtype) -> tuple[float, np.ndarray, np.ndarray, str]:
    return run(dtype, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
def test_cut_vocabulary(pool, dtype, tolerance) -> None:
    loss, grad_h, grad_weight = expected(dtype)
    values, parts_h, parts_weight, _ = zip(*pool.run(3, _cut, dtype), strict=True)
    assert set(values) == {values[0]} and values[0] == pytest.approx(loss, rel=tolerance)
    assert relative_error(sum(parts_h), grad_h) < tolerance
    assert relative_error(np.concatenate(parts_weight), grad_weight) < tolerance


@pytest.mark.parametrize("logits_at_a_time", [1 << 29, 2 * V, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
def test_parts_that_count_differently(monkeypatch, dtype, tolerance, logits_at_a_time) -> None:
    monkeypatch.setattr(kernels.cross_entropy, "_SLICE", logits_at_a_time)
    scales = (1.0, 0.0, 0.3)
    h_TD, weight_VD, labels_T = inputs(dtype)
    exact_TD, exact_VD = (tensor.double().requires_grad_() for tensor in (h_TD, weight_VD))
    losses_T = F.cross_entropy(exact_TD @ exact_VD.t(), labels_T, ignore_index=IGNORED, reduction="none")
    wanted = [part_T.sum() for part_T in losses_T.chunk(3)]
    (3 * sum(scale * part for scale, part in zip(scales, wanted, strict=True))).backward()

    total, sums_N = linear_cross_entropy_sums(h_TD.requires_grad_(), weight_VD.requires_grad_(), labels_T, IGNORED, scales)
    (3 * total).backward()
    assert not sums_N.requires_grad
    assert sums_N.tolist() == pytest.approx([part.item() for part in wanted], rel=tolerance)
    assert total.item() == pytest.approx(sum(s * part.item() for s, part in zip(scales, wanted, strict=True)), rel=tolerance)
    assert relative_error(h_TD.grad.double().numpy(), exact_TD.grad.numpy()) < tolerance
    assert relative_error(weight_VD.grad.double().numpy(), exact_VD.grad.numpy()) < tolerance


def test_nothing_is_trained() -> None:
    h_TD, weight_VD, _ = inputs(torch.float32)
    h_TD.requires_grad_()
    loss, _ = linear_cross_entropy_sums(h_TD, weight_VD, torch.full((T,), IGNORED), IGNORED, (1.0,))
    loss.backward()
    assert loss.item() == 0 and not h_TD.grad.any()


def test_without_gradients() -> None:
    h_TD, weight_VD, labels_T = inputs(torch.float64)
    with torch.no_grad():
        loss, _ = linear_cross_entropy_sums(h_TD, weight_VD.requires_grad_(), labels_T, IGNORED, (1.0,))
    assert loss.item() == pytest.approx(expected(torch.float64)[0], rel=1e-12) and not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ops_are_registered_correctly(dtype) -> None:
    h_TD, weight_VD, labels_T = inputs(dtype)
    logits_TV = h_TD @ weight_VD.t()
    torch.library.opcheck(partial_cross_entropy, (logits_TV, labels_T, 0))
    wide = torch.promote_types(dtype, torch.float32)
    torch.library.opcheck(cross_entropy_backward_, (logits_TV, labels_T, torch.rand(T, dtype=wide), torch.rand(T, dtype=wide), 0))
