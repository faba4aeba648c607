"""Runs Gluon kernels for Hopper on the CPU: partitions are threads, which barriers in shared memory keep in step.

A program begins when one of as many multiprocessors as there are is free, so that some may begin when others have ended.

Products and stores that are asynchronous happen as late as the kernel's waits allow, with what then stands in shared memory: who
lets go of a stage or of a place too early computes something else. Who forgets a fence fails, as does who waits for what never
comes, or loads and counts for more than a minute. Only what the kernels use is here, and no layouts: how registers and shared
memory hold a block is the compiler's. All integers have 64 bits.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

_PATIENCE = 10.0  # seconds
# Of a partition: its program's number and grid, when it must have ended, products and stores under way, what is not fenced.
_here = threading.local()
_changed = threading.Condition()
# Of the last launch: how often each element was stored, by the address of a tensor, and the programs that loaded anything.
stored: dict[int, Tensor] = {}
loaded: set[int] = set()


class Descriptor:
    def __init__(self, x: Tensor, *block: int):
        # Elements of 8 bits are only copied, and E4M3 does less than bytes.
        self.x, self.dtype, self.layout = x.view(torch.uint8) if x.itemsize == 1 else x, x.dtype, None
        self.block_type = SimpleNamespace(shape=list(block), nbytes=math.prod(block) * x.itemsize)

    def inside(self, place: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that lies in the tensor: there, and in the block."""
        edges = [
            (max(first, 0), min(first + length, size))
            for first, length, size in zip(map(int, place), self.block_type.shape, self.x.shape, strict=True)
        ]
        there = tuple(slice(low, max(low, high)) for low, high in edges)
        return there, tuple(slice(s.start - int(first), s.stop - int(first)) for s, first in zip(there, place, strict=True))


class Shared:
    """A block in shared memory."""

    def __init__(self, x: Tensor):
        self.x, self.shape, self.dtype = x, list(x.shape), x.dtype

    def index(self, i: int) -> "Shared":
        return Shared(self.x[int(i)])

    def slice(self, first: int, length: int) -> "Shared":
        return Shared(self.x[first : first + length])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.x.permute(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.x.view(shape))

    def load(self, layout: None) -> Tensor:
        return self.x.clone()

    def store(self, x: Tensor) -> None:
        self.x.copy_(x)
        _here.unfenced.add(self._memory())

    def _memory(self) -> int:
        return self.x.untyped_storage().data_ptr()

    def check_fenced(self) -> None:
        """What reads asynchronously sees what a partition has stored only behind a fence."""
        assert self._memory() not in _here.unfenced, "stored, but not fenced"


class Block(Tensor):
    """A tensor that also reads its bits as another type."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    def __init__(self, x: Tensor, offset: Any = 0, dtype: torch.dtype | None = None):
        raw = x.view(torch.uint8) if x.itemsize == 1 else x  # E4M3 does less than bytes
        self.x = raw.as_strided((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,))
        self.offset, self.dtype = offset, dtype or x.dtype

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.x, self.offset + offset, self.dtype)

    def __sub__(self, offset: Any) -> "Pointer":
        return self + -offset


class Barrier:
    def __init__(self, arrivals: int):
        self.arrivals, self.missing, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def count(self, arrivals: int, size: int) -> None:
        with _changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            assert self.missing >= 0
            if not self.missing and not self.bytes:
                self.missing, self.phase = self.arrivals, self.phase ^ 1
                _changed.notify_all()


class Barriers:
    def __init__(self, count: int):
        self.all: list[Barrier | None] = [None] * count

    def index(self, i: int) -> SimpleNamespace:
        return SimpleNamespace(all=self.all, i=int(i))


def _init(place: SimpleNamespace, arrivals: int) -> None:
    place.all[place.i] = Barrier(arrivals)


def _wait(place: SimpleNamespace, parity: int) -> None:
    with _changed:
        assert _changed.wait_for(lambda: place.all[place.i].phase != parity, _PATIENCE), "a phase that never completes"


def _arrive(place: SimpleNamespace, count: int = 1) -> None:
    place.all[place.i].count(count, 0)


def _expect(place: SimpleNamespace, size: int) -> None:
    place.all[place.i].count(1, size)


def _copy_in(desc: Descriptor, at: list[int], bar: SimpleNamespace, block: Shared) -> None:
    assert block.shape == desc.block_type.shape
    _not_forever()
    loaded.add(_here.program[0][0])
    there, here = desc.inside(at)
    raw = block.x.view(torch.uint8) if block.x.itemsize == 1 else block.x
    raw.zero_()
    raw[here] = desc.x[there]
    bar.all[bar.i].count(0, -desc.block_type.nbytes)


def _copy_out(desc: Descriptor, at: list[int], block: Shared) -> None:
    block.check_fenced()
    _here.stores.append((desc, at, block))


def _store_wait(pending: int) -> None:
    while len(_here.stores) > pending:
        desc, at, block = _here.stores.pop(0)
        there, here = desc.inside(at)
        desc.x[there] = block.x[here]
        _count(desc.x)[there] += 1


def _count(x: Tensor) -> Tensor:
    return stored.setdefault(x.data_ptr(), torch.zeros(x.numel(), dtype=torch.int32)).view(x.shape)


def _multiply(left: Shared, right: Shared, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left.check_fenced()
    right.check_fenced()
    _here.products.append((left, right, total))
    return total if use_acc else total.zero_()


def _multiply_wait(pending: int, deps: list[Tensor]) -> Tensor:
    while len(_here.products) > pending:
        left, right, total = _here.products.pop(0)
        total += left.x.float() @ right.x.float()
    return deps[0]


def _load(at: Pointer, mask: Any = True, other: float = 0) -> Any:
    if not isinstance(at.offset, Tensor):
        return at.x[int(at.offset)].item() if mask else other
    mask = torch.as_tensor(mask).expand_as(at.offset)
    assert ((0 <= at.offset) & (at.offset < len(at.x)))[mask].all()
    found = at.x.new_full(mask.shape, other)
    found[mask] = at.x[at.offset[mask]]
    return found.view(at.dtype).as_subclass(Block)


def _store(at: Pointer, x: Any, mask: Any = True) -> None:
    x = torch.as_tensor(x, dtype=at.dtype).view(at.x.dtype)
    mask = torch.as_tensor(mask).expand_as(x)
    chosen = torch.as_tensor(at.offset).expand_as(x)[mask]
    at.x[chosen] = x[mask]
    with _changed:
        _count(at.x)[chosen] += 1


def _atomic(change: Callable[[Tensor, Tensor], Tensor], late: float = 0) -> Callable[..., Tensor]:
    """``late``: seconds after which it happens, for who does not wait for it to be seen."""

    def atomic(at: Pointer, x: Tensor | int, mask: Tensor | None = None, *, sem: str, scope: str) -> Tensor | int:
        _not_forever()
        assert scope == "gpu" and sem in ("relaxed", "acquire", "release")
        time.sleep(late)
        with _changed:
            if mask is None:
                before = int(at.x[at.offset])
                at.x[at.offset] = change(before, x)
                return before
            before = torch.full_like(x, -7)
            before[mask] = at.x[at.offset[mask]]
            at.x[at.offset[mask]] = change(before, x)[mask]
        return before

    return atomic


def _not_forever() -> None:
    assert time.monotonic() < _here.deadline, "a kernel that does not end"


def _allocate(dtype: torch.dtype, shape: list[int], layout: None) -> Shared | Barriers:
    return Barriers(shape[0]) if dtype == torch.int64 else Shared(torch.full(shape, 7).to(dtype))


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _minimum(a: Any, b: Any) -> Any:
    return a.clamp(max=b) if isinstance(a, Tensor) else min(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)) if isinstance(a, Tensor) else max(a, b)


def _pack(code: str, constraints: str, pair: list[Tensor], dtype: torch.dtype, is_pure: bool, pack: int) -> Tensor:
    assert code.startswith("cvt.rn.bf16x2.f32 $0, $2, $1")
    return torch.stack([x.bfloat16() for x in pair], -1).view(torch.int32).squeeze(-1)


def _specialize(partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    failures, inherited = [], {"program": _here.program, "deadline": _here.deadline}

    def run(partition: Any, arguments: tuple[Any, ...]) -> None:
        _here.__dict__.update(inherited, products=[], stores=[], unfenced=set())
        try:
            partition(*arguments)
            assert not _here.products and not _here.stores
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


_LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("int32", "int64", "float16", "float32", "zeros_like", "exp")},
    constexpr=None, float8e4nv=torch.float8_e4m3fn, float8e5=torch.float8_e5m2, abs=torch.abs, max=lambda x, axis: x.amax(axis),
    div_rn=lambda a, b: torch.tensor(a) / b,  # of a number torch would multiply by the inverse
    load=_load, store=_store, allocate_shared_memory=_allocate, where=_where, minimum=_minimum, maximum=_maximum,
    atomic_add=_atomic(lambda before, x: before + x), atomic_xchg=_atomic(lambda before, x: x),
    atomic_max=_atomic(torch.maximum, late=1e-2),
    sum=lambda x, axis: int(x.sum()), associative_scan=lambda x, axis, add: x.cumsum(axis), convert_layout=lambda x, layout: x,
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype).as_subclass(Block),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    arange=lambda a, b, layout: torch.arange(a, b).as_subclass(Block),
    SliceLayout=lambda *_: None, cdiv=lambda a, b: -(-a // b), static_range=range,
    to_tensor=lambda x: torch.tensor(x).as_subclass(Block), split=lambda x: x.unbind(-1),
    program_id=lambda axis: _here.program[0][axis], num_programs=lambda axis: _here.program[1][axis],
    reshape=torch.reshape, permute=torch.permute, inline_asm_elementwise=_pack, warp_specialize=_specialize,
)  # fmt: skip
_KNOWN = {
    id(gl): _LANGUAGE,
    id(tl): _LANGUAGE,
    id(hopper.mbarrier): SimpleNamespace(init=_init, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=lambda: None),
    id(hopper.tma): SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    ),
    id(hopper.warpgroup_mma): _multiply,
    id(hopper.warpgroup_mma_wait): _multiply_wait,
    id(hopper.fence_async_shared): lambda: _here.unfenced.clear(),
}


def plain(value: Any) -> Any:
    """What a kernel's global name stands for here."""
    if id(value) in _KNOWN:
        return _KNOWN[id(value)]
    if isinstance(value, JITFunction):
        names: dict[str, Any] = {}
        function = FunctionType(value.fn.__code__, names, value.fn.__name__, value.fn.__defaults__)
        for name in value.fn.__code__.co_names:
            if name in value.fn.__globals__:
                names[name] = plain(value.fn.__globals__[name])
        return function
    if isinstance(value, gl.constexpr):
        return value.value
    return lambda *_: None  # makes a layout


class OnThreads:
    """Stands for a kernel, on so many multiprocessors."""

    def __init__(self, kernel: JITFunction, multiprocessors: int):
        self.source, self.kernel, self.multiprocessors = kernel, plain(kernel), multiprocessors

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            arguments = tuple(Pointer(x) if isinstance(x, Tensor) else x for x in arguments)
            stored.clear()
            loaded.clear()
            deadline = time.monotonic() + 60

            def run(program: tuple[int, ...]) -> None:
                _here.program, _here.deadline = (program, grid), deadline
                self.kernel(*arguments, **constants)

            with ThreadPoolExecutor(self.multiprocessors) as pool:
                list(pool.map(run, itertools.product(*map(range, grid))))

        return launch
