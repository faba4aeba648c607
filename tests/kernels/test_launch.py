"""Launches that find what was compiled before: for the same kinds of arguments, and for no others."""

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import grouped_mm_launch
from kernels import launch as launching


class Kernel:
    """Compiles for the arguments of a launch, and notes by which way each launch came."""

    def __init__(self):
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, num_warps, **constants):
            self.compiled.append((grid, args, constants, num_warps))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    monkeypatch.setattr(launching, "_compiled", {})
    return Kernel()


def _launch(kernel: Kernel, *args, **constants) -> None:
    launching.launch(kernel, (7,), *args, options={"num_warps": 4}, **constants)


def test_second_launch_of_the_same_kind_compiles_nothing(kernel):
    x, y = torch.zeros(8), torch.ones(8)
    _launch(kernel, x, None, 5, SIZE=3)
    _launch(kernel, y, None, 5, SIZE=3)
    assert kernel.compiled == [((7,), (x, None, 5), {"SIZE": 3}, 4)]
    ((grid, (first, *others)),) = kernel.launched
    assert first is y and grid[:3] == (7, 1, 1) and others == [None, 5, 3]


def test_every_other_kind_is_compiled(kernel):
    x = torch.zeros(16 * 16)
    descriptor, wider = (
        TensorDescriptor.from_tensor(x.view(16, 16), [rows, 16], grouped_mm_launch._layout((rows, 16), torch.float32))
        for rows in (8, 16)
    )
    launches = [
        (x, 5), (x[1:], 5), (x.to(torch.bfloat16), 5), (None, 5), (x, 1), (x, 16), (x, None), (descriptor, 5), (wider, 5),
    ]  # fmt: skip
    for args in launches:
        _launch(kernel, *args, SIZE=3)
    _launch(kernel, x, 5, SIZE=4)
    launching.launch(kernel, (7,), x, 5, options={"num_warps": 8}, SIZE=3)
    assert len(kernel.compiled) == len(launches) + 2 and not kernel.launched
    other = Kernel()
    _launch(other, x, 5, SIZE=3)
    assert len(other.compiled) == 1


def test_sizes_that_keep_changing_take_no_more_room(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MOST", 3)
    for size in range(10):
        _launch(kernel, torch.zeros(4), size)
        assert len(launching._compiled) <= 3
    _launch(kernel, torch.zeros(4), 9)
    assert len(kernel.launched) == 1
