"""Cross-entropy over whole and cut vocabularies against PyTorch's, in fp64 and on a group of ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels.cross_entropy import cross_entropy_backward_, cross_entropy_sum, partial_cross_entropy

T, V, IGNORED = 9, 12, -100


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = (20 * torch.randn(T, V, generator=generator, dtype=torch.float64)).to(dtype)
    labels_T = torch.randint(0, V, (T,), generator=generator)
    labels_T[::4] = IGNORED
    return logits_TV, labels_T


def expected(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and the gradient of three times the loss, in fp64."""
    logits_TV, labels_T = inputs(dtype)
    logits_TV = logits_TV.double().requires_grad_()
    loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
    (3 * loss).backward()
    return loss.detach(), logits_TV.grad


def run(dtype: torch.dtype, rank: int, ranks: int, group) -> tuple[float, np.ndarray, str]:
    logits_TV, labels_T = inputs(dtype)
    leaf_TV = logits_TV.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    loss = cross_entropy_sum(leaf_TV * 1.0, labels_T, IGNORED, group)
    (3 * loss).backward()
    return loss.item(), leaf_TV.grad.double().numpy(), str(loss.dtype)


CASES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
def test_whole_vocabulary(dtype, tolerance) -> None:
    loss, grad_TV = expected(dtype)
    value, grad, loss_dtype = run(dtype, 0, 1, None)
    assert value == pytest.approx(loss.item(), rel=min(tolerance, 1e-6))
    np.testing.assert_allclose(grad, grad_TV, rtol=tolerance, atol=tolerance)
    assert loss_dtype == ("torch.float64" if dtype == torch.float64 else "torch.float32")


def _cut(dtype: torch.dtype) -> tuple[float, np.ndarray, str]:
    return run(dtype, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
def test_cut_vocabulary(pool, dtype, tolerance) -> None:
    loss, grad_TV = expected(dtype)
    values, grads, _ = zip(*pool.run(3, _cut, dtype), strict=True)
    assert set(values) == {values[0]} and values[0] == pytest.approx(loss.item(), rel=min(tolerance, 1e-6))
    np.testing.assert_allclose(np.concatenate(grads, axis=1), grad_TV, rtol=tolerance, atol=tolerance)


def test_nothing_is_trained() -> None:
    logits_TV = torch.randn(T, V, requires_grad=True)
    loss = cross_entropy_sum(logits_TV * 1.0, torch.full((T,), IGNORED), IGNORED)
    loss.backward()
    assert loss.item() == 0 and not logits_TV.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ops_are_registered_correctly(dtype) -> None:
    logits_TV, labels_T = inputs(dtype)
    torch.library.opcheck(partial_cross_entropy, (logits_TV, labels_T, 0))
    wide = torch.promote_types(dtype, torch.float32)
    torch.library.opcheck(cross_entropy_backward_, (logits_TV, labels_T, torch.rand(T, dtype=wide), torch.rand(T, dtype=wide), 0))
