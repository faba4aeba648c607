"""AdamW on split weights against torch's own on whole ones."""

import pytest
import torch

from kernels.adamw import adamw_, join_fp32, split_fp32

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def numbers() -> torch.Tensor:
    """fp32 of all magnitudes: ties of bf16's rounding, zeros, subnormals, and a large one that stays finite in bf16."""
    torch.manual_seed(0)
    wide = torch.randn(4096) * 10.0 ** torch.randint(-38, 37, (4096,))
    ties = (torch.randint(0x0080, 0x7F00, (512,), dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    return torch.cat((wide, ties, -ties, torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.38e38])))


def test_halves_hold_every_bit() -> None:
    x = numbers()
    high, low = split_fp32(x)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_fp32(high, low).view(torch.int32), x.view(torch.int32))
    tie = x.view(torch.int32) & 0xFFFF == 0x8000
    assert tie.sum() >= 1024 and torch.equal(high[~tie], x[~tie].bfloat16())
    assert torch.equal(high[tie].float().abs() > x[tie].abs(), torch.ones_like(tie[tie]))


def test_every_nan_stays_one() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FFF8000, 0x7F800001, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    high, low = split_fp32(nan)
    assert high.isnan().all() and join_fp32(high, low).isnan().all()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(split, grad_dtype) -> None:
    torch.manual_seed(1)
    whole = torch.nn.Parameter(torch.randn(37, 5))
    adam = torch.optim.AdamW([whole], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    weight, low = split_fp32(whole.detach()) if split else (whole.detach().clone(), None)
    moments = torch.zeros(37, 5), torch.zeros(37, 5)
    for step in range(1, 6):
        grad, lr = torch.randn(37, 5).to(grad_dtype), 0.1 / step
        adam.param_groups[0]["lr"], whole.grad = lr, grad.float() * 0.3
        adam.step()
        adamw_(weight, low, grad, *moments, torch.tensor(0.3), lr, *SETTINGS.values(), step)
        master = join_fp32(weight, low) if split else weight
        assert (master - whole.detach()).norm() / whole.detach().norm() < 1e-6
    if split:
        assert torch.equal(weight, split_fp32(master)[0])


def test_nan_scale_changes_nothing() -> None:
    tensors = torch.randn(37), torch.randn(37), torch.randn(37), torch.rand(37)
    before = [tensor.clone() for tensor in tensors]
    adamw_(tensors[0], None, *tensors[1:], torch.tensor(torch.nan), 0.01, *SETTINGS.values(), 1)
    assert all(map(torch.equal, tensors, before))


def test_bf16_weights_are_rounded_once() -> None:
    torch.manual_seed(2)
    bf16 = [torch.randn(99).bfloat16(), 0.1 * torch.randn(99).bfloat16(), torch.rand(99).bfloat16()]
    fp32, grad = [tensor.float() for tensor in bf16], torch.randn(99).bfloat16()
    for weight, *moments in (bf16, fp32):
        adamw_(weight, None, grad, *moments, torch.tensor(0.3), 0.01, *SETTINGS.values(), 3)
    for kept, exact in zip(bf16, fp32, strict=True):
        assert kept.dtype == torch.bfloat16 and torch.equal(kept, exact.bfloat16())


def test_op_is_registered_correctly() -> None:
    weight, low = split_fp32(torch.randn(6))
    moments = torch.zeros(6), torch.zeros(6)
    torch.library.opcheck(adamw_, (weight, low, torch.randn(6), *moments, torch.ones(()), 0.1, *SETTINGS.values(), 1))
