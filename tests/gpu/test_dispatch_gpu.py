"""The transfer kernels on one GPU: every rank has its memory and its stream there, so that signals and data are real."""

import pytest
import torch
from torch import Tensor
from transfer_cases import Case, Received, allocator, expect, judge, make_round, shapes, steps

from kernels import dispatch
from kernels.peers import Exchange, PeerError, TransferShape

DEVICE = torch.device("cuda")
OPS = dispatch._launch_push_tokens, dispatch._launch_push_rows, dispatch._launch_push_sums
BF16 = torch.bfloat16
CASES = [
    Case(2, 1, (700, 513), 256, 4, 16, programs=16, dtype=BF16),
    Case(2, 1, (300, 0), 1100, 3, 6, programs=7),
    Case(4, 1, (130, 64, 7, 257), 72, 8, 32, programs=16, dtype=BF16, hot=True),
    Case(2, 2, (90, 90, 90, 90), 33, 2, 6, programs=5),
    Case(8, 1, (200,) * 8, 512, 6, 64, programs=8, dtype=BF16),
]


def on(device: torch.device | str, tensors):
    """A named tuple of tensors, or of lists of tensors, on a device."""
    if tensors is None:
        return None
    if isinstance(tensors, Tensor):
        return tensors.to(device)
    moved = [on(device, each) for each in tensors]
    return type(tensors)(*moved) if hasattr(tensors, "_fields") else type(tensors)(moved)


def exchanges(case: Case) -> list[Exchange]:
    memories = [torch.zeros(1 << 24, dtype=torch.uint8, device=DEVICE) for _ in range(case.world)]
    names = [f"rank {rank}" for rank in range(case.world)]
    sizes = case.world, case.max_tokens, case.programs
    return [Exchange(rank, *sizes, allocator(memories), names, timeout=20.0) for rank in range(case.world)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transfers(case) -> None:
    groups, streams = exchanges(case), [torch.cuda.Stream() for _ in range(case.world)]
    peers = [[group.peers(shape, DEVICE) for shape in shapes(case)] for group in groups]
    rounds = [make_round(case, number) for number in range(8)]
    expected = [[expect(case, inputs, rank) for rank in range(case.world)] for inputs in rounds]
    inputs_on_gpu, expected_on_gpu = on(DEVICE, rounds), on(DEVICE, expected)
    torch.cuda.synchronize()
    received = []
    for inputs, wanted in zip(inputs_on_gpu, expected_on_gpu, strict=True):
        of_ranks = [steps(OPS, group, each, case, inputs, wanted[group.rank]) for group, each in zip(groups, peers, strict=True)]
        outputs: list[list] = [[] for _ in groups]
        # All ranks start a transfer before any starts the next: loading a new kernel can wait for those that run.
        for transfer in zip(*of_ranks, strict=True):
            for step, stream, output in zip(transfer, streams, outputs, strict=True):
                with torch.cuda.stream(stream):
                    output.append(step())
        received += [Received(*output) for output in outputs]
    torch.cuda.synchronize()
    for each, wanted in zip(received, (of_rank for of_round in expected for of_rank in of_round), strict=True):
        judged = judge(case, on("cpu", each), wanted)
        assert all(judged.values()), judged
    for group, each in zip(groups, peers, strict=True):
        for of_shape in each:
            group.check(of_shape)


def test_missing_rank_is_named() -> None:
    case = Case(2, 1, (64, 64), 64, 2, 4, programs=4)
    group, inputs = exchanges(case)[0], on(DEVICE, make_round(case, 0))
    group.timeout = 0.2
    peers = group.peers(TransferShape(case.D, case.K, case.dtype), DEVICE)
    dispatch._launch_push_tokens(group, peers, inputs.x[0], inputs.experts[0], inputs.weights[0], 2, 1)
    torch.cuda.synchronize()
    with pytest.raises(PeerError, match="rank 1 did not take part"):
        group.check(peers)
    peers.failure.zero_()  # or it would end this process
