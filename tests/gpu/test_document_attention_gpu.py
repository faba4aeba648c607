"""Attention within documents on the GPU against fp64: odd sizes, poisoned memory, strided input, what the kernels do not take."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import document_attention as da
from parallelisms.activation_checkpoint import _save_expensive_ops

# B, H, key heads, S, width of queries and keys, of values, mean length of a document (0: one a row).
SHAPES = [
    (1, 1, 1, 1, 192, 128, 0),
    (1, 1, 1, 5, 192, 128, 0),
    (2, 4, 4, 500, 192, 128, 40),
    (3, 4, 2, 333, 192, 128, 1),
    (2, 8, 2, 384, 128, 128, 90),
    (1, 2, 2, 1024, 96, 64, 0),
    (2, 4, 1, 200, 16, 16, 30),
]


def inputs(B, H, Hk, S, D, DV, mean, dtype=torch.bfloat16) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values (a part of wider heads), the output's gradient, and where documents begin."""
    q, k, v, grad = (
        torch.randn(B, S, heads, width, dtype=dtype, device="cuda") for heads, width in ((H, D), (Hk, D), (Hk, 2 * DV), (H, DV))
    )
    begins_BS = torch.rand(B, S, device="cuda") < (1 / mean if mean else 0)
    return [x.transpose(1, 2) for x in (q, k, v[..., DV:])], grad.transpose(1, 2), begins_BS


def forward_backward(attention, qkv: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def assert_close_to_fp64(actual: tuple[Tensor, ...], qkv: list[Tensor], grad: Tensor, first_T: Tensor, bound: float) -> None:
    reference = partial(da.document_attention_reference, first_T=first_T, scale=qkv[0].shape[-1] ** -0.5)
    expected = forward_backward(reference, [x.double() for x in qkv], grad.double())
    for ours, wanted in zip(actual, expected, strict=True):
        # Queries and keys of documents of one token have no gradient.
        assert (ours - wanted).norm() < bound * max(wanted.norm(), 0.01 * grad.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", [2**30, 1])
def test_document_attention(poisoned, shape, dtype, workspace) -> None:
    qkv, grad, begins_BS = inputs(*shape, dtype)
    documents, scale = da.find_documents(begins_BS), qkv[0].shape[-1] ** -0.5
    out, lse = poisoned(da._launch_forward, *qkv, documents.first_T, scale)
    grads = poisoned(da._launch_backward, grad, *qkv, out, lse, documents, scale, workspace)
    assert_close_to_fp64((out, *grads), qkv, grad, documents.first_T, 1e-2)
    again = da._launch_backward(grad, *qkv, out, lse, documents, scale, workspace)
    assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize(
    ("dtype", "D", "DV", "bound"),
    [(torch.float32, 192, 128, 1e-4), (torch.bfloat16, 24, 16, 2e-2), (torch.bfloat16, 256, 256, 2e-2)],
    ids=str,
)
def test_others_go_through_torch(dtype, D, DV, bound) -> None:
    qkv, grad, begins_BS = inputs(2, 4, 2, 200, D, DV, 50, dtype)
    documents = da.find_documents(begins_BS)
    with patch.object(da, "_launch_forward", side_effect=AssertionError):
        attention = partial(da.document_attention, documents=documents, scale=D**-0.5)
        assert_close_to_fp64(forward_backward(attention, qkv, grad), qkv, grad, documents.first_T, bound)


def test_one_graph_for_all_documents_and_no_wait_for_the_host() -> None:
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(da.document_attention, backend=backend, fullgraph=True)
    try:
        for batch in range(4):
            qkv, grad, begins_BS = inputs(2, 4, 2, 333, 192, 128, 10 + 50 * batch)
            torch.cuda.set_sync_debug_mode("error" if batch else "default")
            documents = da.find_documents(begins_BS)
            runs = [
                forward_backward(partial(attention, documents=documents, scale=0.1), qkv, grad)
                for attention in (compiled, da.document_attention)
            ]
            torch.cuda.set_sync_debug_mode("default")
            assert all(map(torch.equal, *runs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(graphs) == 1


def test_selective_recomputation_keeps_the_output() -> None:
    qkv, grad, begins_BS = inputs(2, 4, 4, 200, 192, 128, 50)
    attention = partial(da.document_attention, documents=da.find_documents(begins_BS), scale=0.1)
    with patch.object(da, "_launch_forward", wraps=da._launch_forward) as launch:
        kept = partial(checkpoint, lambda *x: attention(*(2 * y for y in x)), use_reentrant=False)
        run = forward_backward(partial(kept, context_fn=partial(_save_expensive_ops, False)), qkv, grad)
        assert launch.call_count == 1
    assert all(map(torch.equal, run, forward_backward(lambda *x: attention(*(2 * y for y in x)), qkv, grad)))
