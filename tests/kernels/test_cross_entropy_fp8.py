"""The gradient of logits as FP8 operands: the kernel on threads against its reference; and compiled for Hopper."""

import re

import pytest
import torch
from gluon_compiled import Recorded, compiled_for_hopper
from gluon_threads import OnThreads, stored
from torch import Tensor

from kernels import cross_entropy_fp8, cross_entropy_fp8_kernels


def arguments(T: int, V: int, stride: int, first: int) -> tuple[Tensor, ...]:
    """Labels here, elsewhere, and none; a token that does not count; a factor by which the largest number is beyond E4M3's."""
    torch.manual_seed(0)
    logits_TV = (3 * torch.randn(T, stride)).bfloat16()[:, :V]
    labels_T, grad_T = torch.randint(first, first + V, (T,)), torch.rand(T)
    if T:
        labels_T[0], labels_T[1], grad_T[2] = -100, first + V, 0
    lse_T = logits_TV.float().logsumexp(1) + torch.rand(T)
    return logits_TV, labels_T, lse_T, grad_T, first, 2.0 ** torch.randint(6, 11, (T,)), torch.tensor([32768.0])


CASES = pytest.mark.parametrize("sizes", [(7, 304, 304, 0), (3, 16, 16, 16), (130, 144, 160, 100), (0, 16, 16, 0)], ids=str)


@CASES
def test_kernel_equals_reference(monkeypatch, sizes) -> None:
    """Up to a rounding of numbers that are exactly between two, since the gradients are the same in every bit but the last."""
    kernel = cross_entropy_fp8_kernels._gradients_kernel
    monkeypatch.setattr(cross_entropy_fp8_kernels, "_gradients_kernel", OnThreads(kernel, 3))
    given = arguments(*sizes)
    actual, wanted = cross_entropy_fp8.launch_gradients(*given), cross_entropy_fp8.cross_entropy_backward_fp8(*given)
    for mine, expected in zip(actual, wanted, strict=True):
        assert mine.shape == expected.shape and mine.dtype == expected.dtype
        if mine.numel():
            assert (stored[mine.data_ptr()] == 1).all()
            mine, expected, step = mine.float(), expected.float(), 2.0 ** (-3 if mine.dtype == cross_entropy_fp8.E4M3 else -2)
            assert (mine != expected).double().mean() < 2e-3
            assert ((mine - expected).abs() <= step * expected.abs() + 2.0**-9).all()  # one step of the format
    torch.library.opcheck(
        cross_entropy_fp8.cross_entropy_backward_fp8, given, test_utils=("test_faketensor", "test_autograd_registration")
    )


@CASES
def test_elements_times_scales_are_the_gradient(sizes) -> None:
    logits_TV, labels_T, lse_T, grad_T, first, factor_T, turned_factor = given = arguments(*sizes)
    rows_TV, turned_VW = cross_entropy_fp8.cross_entropy_backward_fp8(*given)
    T, V = logits_TV.shape
    onehot_TV = (labels_T[:, None] - first == torch.arange(V)).double()
    grad_TV = ((logits_TV.double() - lse_T[:, None]).exp() - onehot_TV) * grad_T[:, None]
    fits_TV = (grad_TV * factor_T[:, None]).abs() < 440
    error_TV = (rows_TV.double() / factor_T[:, None] - grad_TV).abs()
    assert (error_TV <= grad_TV.abs() / 15 + 2.0**-9 / factor_T[:, None])[fits_TV].all()
    assert (rows_TV.float().abs() == 448)[~fits_TV].all()
    error_TV = (turned_VW[:, :T].double().t() / turned_factor - grad_TV).abs()
    assert (error_TV <= grad_TV.abs() / 7 + 2.0**-16 / turned_factor).all()
    assert not turned_VW[:, T:].float().any() and turned_VW.shape == (V, -(-T // 128) * 128)


def test_no_unlikely_word_is_lost() -> None:
    """Of a probability of 2^-28, as it has among many, in E5M2, though not in E4M3."""
    logits_TV = torch.full((2, 16), -28 * torch.tensor(2.0).log()).bfloat16()
    lse_T, ones_T = torch.zeros(2), torch.ones(2)
    given = logits_TV, torch.tensor([3, 4]), lse_T, ones_T, 0, 256 * ones_T, torch.tensor([32768.0])
    rows_TV, turned_VW = cross_entropy_fp8.cross_entropy_backward_fp8(*given)
    assert (rows_TV.float() != 0).sum() == 2 and (turned_VW[:, :2].float() != 0).all()


def test_kernel_fits_a_multiprocessor(monkeypatch, tmp_path) -> None:
    """Next to nothing spills, and four programs find room."""
    kernel, launched = cross_entropy_fp8_kernels._gradients_kernel, Recorded()
    monkeypatch.setattr(cross_entropy_fp8_kernels, "_gradients_kernel", launched)
    cross_entropy_fp8.launch_gradients(*arguments(130, 256, 256, 0))
    said = compiled_for_hopper(kernel, launched, tmp_path)[1]
    assert int(re.search(r"(\d+) bytes spill loads", said)[1]) <= 64
    assert 4 * 128 * int(re.search(r"Used (\d+) registers", said)[1]) <= 65536
