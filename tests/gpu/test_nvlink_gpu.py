"""The nvlink dispatcher between two GPUs: against alltoall, and when a rank dies."""

import gc
import os
import signal
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_ranks import WORLD, join_group, run_ranks
from rows import place_rows
from torch import Tensor

from kernels.packed_tokens import Packing, spread_packed
from kernels.peers import PeerError, set_timeout
from kernels.quantize import spread_rows_fp8
from kernels.sort import sort_pairs
from parallelisms.dispatch import build_dispatcher
from parallelisms.dispatch.base import Dispatcher
from parallelisms.routing import PairOrder, Routing

D, K, E = 256, 4, 16
MIB = 2**20


def make_inputs(tokens: int, seed: int, hot: bool) -> list[Tensor]:
    """Tokens, weights, experts and the gradient of the result; if hot, all go to the first rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores_TE = torch.rand(tokens, E, device="cuda", generator=generator)
    scores_TE[:, : E // WORLD] += hot
    experts_TK = scores_TE.topk(K).indices
    experts_TK[::7] = E  # not routed
    x_TD, grad_TD = (torch.randn(tokens, D, device="cuda", generator=generator).bfloat16() for _ in range(2))
    return [x_TD, torch.rand(tokens, K, device="cuda", generator=generator), experts_TK, grad_TD]


def pass_through(dispatcher: Dispatcher, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, grad_TD: Tensor) -> list[Tensor]:
    """Rows as they arrive, and with experts that multiply by the weight the results and the gradients of tokens and weights."""
    x_TD, weights_TK = x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()
    order = PairOrder(*sort_pairs(experts_TK.flatten(), E))
    routed, handle = dispatcher.dispatch(x_TD, Routing(experts_TK, weights_TK, order))
    rows_RD = place_rows(routed.tokens_ND, routed.row_NK, len(routed.pair_R))
    weights_R1 = place_rows(routed.weights_P[:, None], routed.row_NK.view(-1, 1), len(routed.pair_R))
    y_TD = dispatcher.combine((rows_RD * weights_R1).bfloat16(), handle)
    return [rows_RD[: routed.offsets_e[-1]].detach(), y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, weights_TK), grad_TD)]


def occupy(nbytes: int) -> Tensor:
    """Memory between GPUs, all ones: takes the place of what has been freed."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())).fill_(255)


def compare(rank: int, folder: str) -> None:
    join_group(rank, folder)
    most = 300
    nvlink, alltoall = (build_dispatcher(kind, E, dist.group.WORLD, WORLD, 1, most) for kind in ("nvlink", "alltoall"))
    pass_through(nvlink, *make_inputs(most, rank, hot=False))
    gc.collect()
    torch.cuda.synchronize()
    dist.barrier()
    occupied = [occupy(MIB << size) for size in range(5)]
    for number in range(20):
        tokens = (most, 211, 0)[(number + rank) % 3]
        inputs = make_inputs(tokens, 2 * number + rank, hot=number % 4 == 3)
        (rows, *ours), (wanted_rows, *wanted) = (pass_through(dispatcher, *inputs) for dispatcher in (nvlink, alltoall))
        assert torch.equal(rows, wanted_rows)
        for actual, expected in zip(ours, wanted, strict=True):
            assert actual.dtype == expected.dtype
            assert (actual.double() - expected.double()).norm() <= 5e-3 * expected.double().norm()
    assert all((each == 255).all() for each in occupied)
    dist.barrier()
    dist.destroy_process_group()


def test_as_alltoall(tmp_path) -> None:
    """Also when everything else has been freed and its place taken: transfers must reach the memory that is theirs."""
    assert run_ranks(compare, tmp_path, 240) == [0, 0]


def compare_packed(rank: int, folder: str) -> None:
    """By either dispatcher, packed or not: the same operands, and the same gradients of as many copies."""
    join_group(rank, folder)
    most, packing = 300, Packing(blockwise=True)
    dispatchers = [build_dispatcher(kind, E, dist.group.WORLD, WORLD, 1, most) for kind in ("nvlink", "alltoall")]
    for number in range(6):
        inputs = make_inputs((most, 211, 0)[(number + rank) % 3], 2 * number + rank, hot=number == 5)
        x_TD, weights_TK, experts_TK, _ = inputs
        routing = Routing(experts_TK, weights_TK, PairOrder(*sort_pairs(experts_TK.flatten(), E)))
        x_TD.requires_grad_()
        results = []
        for dispatcher, packed in product(dispatchers, (True, False)):
            routed, _ = dispatcher.dispatch(x_TD, routing, None, packing.pack(x_TD) if packed else None)
            rows, names = int(routed.offsets_e[-1]), (routed.row_NK, len(routed.pair_R))
            if packed:
                elements, scale = spread_packed(routed.packed_NW, *names, D, True)
            else:
                elements, scale = spread_rows_fp8(routed.tokens_ND.detach(), *names, True)
            ones_ND = torch.ones(routed.tokens_ND.shape, device="cuda", dtype=torch.bfloat16)
            copies_TD = torch.autograd.grad(routed.tokens_ND, x_TD, ones_ND)
            results.append((elements[:rows].view(torch.uint8), scale[:, :rows].contiguous(), *copies_TD))
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))
    dist.barrier()
    dist.destroy_process_group()


def test_packed_tokens(tmp_path) -> None:
    assert run_ranks(compare_packed, tmp_path, 120) == [0, 0]


def lose_rank(rank: int, folder: str) -> None:
    """The second rank dies between dispatch and combine; the first notes its error and when it came."""
    join_group(rank, folder)
    dispatcher = build_dispatcher("nvlink", E, dist.group.WORLD, WORLD, 1, 300)
    x_TD, weights_TK, experts_TK, _ = make_inputs(300, rank, hot=False)
    pass_through(dispatcher, *make_inputs(300, rank, hot=False))
    torch.cuda.synchronize()
    dist.barrier()
    set_timeout(3)
    started = time.monotonic()
    try:
        for number in range(1000):
            routed, handle = dispatcher.dispatch(x_TD, Routing(experts_TK, weights_TK, None))
            if (rank, number) == (1, 5):
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            dispatcher.combine(x_TD.new_zeros(len(routed.pair_R), D), handle)
            torch.cuda.synchronize()
    except PeerError as error:
        Path(folder, "error").write_text(f"{time.monotonic() - started} {error}")
        os._exit(0)


def test_dead_rank_is_named(tmp_path) -> None:
    assert run_ranks(lose_rank, tmp_path, 120) == [0, -signal.SIGKILL]
    seconds, message = (tmp_path / "error").read_text().split(" ", 1)
    assert message.startswith("rank 1 did not take part") and float(seconds) < 60
