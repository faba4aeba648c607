"""Causal attention within documents, for heads whose queries and keys are wider than their values (192 and 128 in MLA).

FlashAttention-2 (arXiv 2307.08691) over the packed tokens of a batch. A document is two numbers per token, where it begins and
where it ends: no list of lengths, so nothing waits for the host and any layout of documents is the same program.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import document_attention_kernels as device
from kernels.op import op

# Edge of the tiles in which the gradient of the scores is stored, and the most bytes that it may take at once.
TILE = 128
_WORKSPACE = 2**31


class Documents(NamedTuple):
    """Where the document of each of the T = B * S tokens begins and ends (inclusive), int32; see :func:`find_documents`.

    ``slot``: by tile of queries, where its tile of scores with the batch's first keys would be stored; its tile with the n-th
    tile of keys stands n places before.
    """

    first_T: Tensor
    last_T: Tensor
    slot: Tensor


def find_documents(begins_BS: Tensor) -> Documents:
    """The documents of a batch, given which tokens begin one (bool; the first of a row always does)."""
    begins_BS = begins_BS.clone()
    begins_BS[:, 0] = True
    begins_T = begins_BS.flatten()
    t_T = torch.arange(begins_T.numel(), dtype=torch.int32, device=begins_BS.device)
    first_T = torch.where(begins_T, t_T, 0).cummax(0).values
    ends_T = begins_T.roll(-1)
    last_T = torch.where(ends_T, t_T, len(t_T) - 1).flip(0).cummin(0).values.flip(0)
    block = t_T[: triton.cdiv(len(t_T), TILE)]
    tiles = block + 1 - first_T[::TILE] // TILE
    return Documents(first_T, last_T, (tiles.cumsum(0) - tiles + block).int())


def document_attention_reference(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, first_T: Tensor, scale: float) -> Tensor:
    B, H, S, _ = q_BHSD.shape
    t_S = torch.arange(S, device=first_T.device)
    first_BS = first_T.view(B, S) - S * torch.arange(B, device=first_T.device)[:, None]
    mask_BSS = (first_BS[:, :, None] <= t_S) & (t_S <= t_S[:, None])
    # Of torch's kernels that take a mask, those that do not keep all scores want as many key heads as heads.
    k_BHSD, v_BHSD = (x.repeat_interleave(H // x.shape[1], 1) if x.shape[1] < H else x for x in (k_BHSD, v_BHSD))
    return torch.nn.functional.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_BSS[:, None], scale=scale)


class Blocks(NamedTuple):
    """How a kernel cuts its work: tokens of a step and how it runs on a multiprocessor."""

    queries: int
    keys: int
    warps: int
    stages: int


# Fastest of those measured (one H200, torch 2.11.0, triton 3.6.0; 16 heads of 192 and 128).
FORWARD = Blocks(128, 64, 8, 3)
VALUE_GRAD = Blocks(64, TILE, 8, 3)
KEY_GRAD = Blocks(64, TILE, 4, 3)
QUERY_GRAD = Blocks(TILE, 64, 8, 4)

# What the blocks were chosen for: shared memory of a multiprocessor, in bytes (Hopper), and the parts of a head that fit there.
_SHARED_MEMORY = 228 * 1024
_PARTS = (16, 32, 64, 128)


def head_parts(width: int) -> tuple[int, int]:
    """``width`` as the largest power of two in it and the rest."""
    main = 1 << (width.bit_length() - 1)
    return main, width - main


def supports_widths(q_width: int, v_width: int) -> bool:
    """Whether the kernels take heads that wide: values a power of two, queries and keys one or the sum of two; 16 to 128 each."""
    main, rest = head_parts(q_width)
    return main in _PARTS and rest in (0, *_PARTS) and v_width in _PARTS


def _runs_in_kernels(q_BHSD: Tensor, v_BHSD: Tensor) -> bool:
    return (
        q_BHSD.is_cuda
        and q_BHSD.dtype in (torch.bfloat16, torch.float16)
        and supports_widths(q_BHSD.shape[-1], v_BHSD.shape[-1])
        and torch.cuda.get_device_properties(q_BHSD.device).shared_memory_per_multiprocessor >= _SHARED_MEMORY
    )


def _packed(x_BHSD: Tensor) -> Tensor:
    """[T, H, D] with whole heads in a row, each of which begins at a multiple of 16 bytes; a view where possible."""
    x_THD = x_BHSD.transpose(1, 2).flatten(0, 1)
    units = 16 // x_THD.element_size()
    aligned = x_THD.stride(2) == 1 and not any(n % units for n in (*x_THD.stride()[:2], x_THD.storage_offset()))
    return x_THD if aligned else x_THD.contiguous()


class _Heads:
    """Descriptors of [T, H, D] as a matrix of tokens by columns, for blocks of some tokens by one part of a head."""

    def __init__(self, x_THD: Tensor):
        T, H, D = x_THD.shape
        self.head, self.width = x_THD.stride(1), D
        self.matrix = x_THD.as_strided((T, (H - 1) * self.head + D), (x_THD.stride(0), 1))

    def main(self, tokens: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.matrix, [tokens, head_parts(self.width)[0]])

    def rest(self, tokens: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.matrix, [tokens, head_parts(self.width)[1] or self.width])


LOG2_E = 1.4426950408889634


def _launch_forward(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, first_T: Tensor, scale: float, blocks: Blocks = FORWARD
) -> tuple[Tensor, Tensor]:
    B, H, S, _ = q_BHSD.shape
    T, DV = B * S, v_BHSD.shape[-1]
    out_BSHD = q_BHSD.new_empty(B, S, H, DV)
    lse_HT = q_BHSD.new_empty(H, T, dtype=torch.float32)
    q, k, v, out = (_Heads(x) for x in (_packed(q_BHSD), _packed(k_BHSD), _packed(v_BHSD), out_BSHD.flatten(0, 1)))
    D, R = head_parts(q.width)
    M, N = blocks.queries, blocks.keys
    device._attention_forward_kernel[(triton.cdiv(T, M), H)](
        q.main(M), q.rest(M), k.main(N), k.rest(N), v.main(N), out.main(M), lse_HT, first_T,
        T, q.head, k.head, v.head, out.head, scale * LOG2_E,
        GROUP=H // k_BHSD.shape[1], D=D, R=R, DV=DV, BLOCK_M=M, BLOCK_N=N, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out_BSHD.transpose(1, 2), lse_HT


def _most_tiles(B: int, S: int) -> int:
    """Tiles of scores of a head if every row were one document; one more for a tile of queries that begins in the row before."""
    across = triton.cdiv(S, TILE)
    return B * across * (across + 1) // 2 if S % TILE == 0 else triton.cdiv(B * S, TILE) * (across + 1)


def _launch_backward(
    grad_BHSD: Tensor, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, out_BHSD: Tensor, lse_HT: Tensor,
    documents: Documents, scale: float, workspace: int = _WORKSPACE,
    value_blocks: Blocks = VALUE_GRAD, key_blocks: Blocks = KEY_GRAD, query_blocks: Blocks = QUERY_GRAD,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (B, H, S, _), Hk = q_BHSD.shape, k_BHSD.shape[1]
    T, group = B * S, H // Hk
    out_THD, grad_THD = _packed(out_BHSD), _packed(grad_BHSD)
    grads_BSHD = [x.new_empty(B, S, x.shape[1], x.shape[3]) for x in (q_BHSD, k_BHSD, v_BHSD)]
    q, k, v, grad = (_Heads(x) for x in (_packed(q_BHSD), _packed(k_BHSD), _packed(v_BHSD), grad_THD))
    grad_q, grad_k, grad_v = (_Heads(x.flatten(0, 1)) for x in grads_BSHD)
    D, R = head_parts(q.width)
    shape = {"GROUP": group, "D": D, "R": R, "TILE": TILE}

    delta_HT = torch.empty_like(lse_HT)
    device._attention_delta_kernel[(triton.cdiv(T, 64), H)](
        out_THD, grad_THD, delta_HT, T, *out_THD.stride()[:2], *grad_THD.stride()[:2], DV=v.width, BLOCK_M=64
    )
    slots, tiles = _most_tiles(B, S), triton.cdiv(T, TILE)
    # As many key heads at once as the workspace holds, in turns of the same size.
    most = max(workspace // (slots * TILE * TILE * q_BHSD.element_size() * group), 1)
    heads = triton.cdiv(Hk, triton.cdiv(Hk, most))
    scores_grad = q_BHSD.new_empty(heads * group * slots * TILE, TILE)
    first, last, slot = documents
    for head in range(0, Hk, heads):
        count = min(heads, Hk - head)
        M = value_blocks.queries
        device._attention_value_grad_kernel[(tiles, count)](
            q.main(M), q.rest(M), k.main(TILE), k.rest(TILE), v.main(TILE), grad.main(M), grad_v.main(TILE),
            TensorDescriptor.from_tensor(scores_grad, [TILE, M]), lse_HT, delta_HT, first, last, slot,
            T, slots, head, q.head, k.head, v.head, grad.head, grad_v.head, scale * LOG2_E,
            **shape, DV=v.width, BLOCK_M=M, num_warps=value_blocks.warps, num_stages=value_blocks.stages,
        )  # fmt: skip
        M = key_blocks.queries
        device._attention_key_grad_kernel[(tiles, count)](
            q.main(M), q.rest(M), grad_k.main(TILE), grad_k.rest(TILE), TensorDescriptor.from_tensor(scores_grad, [TILE, M]),
            last, slot, T, slots, head, q.head, grad_k.head, scale,
            **shape, STEP=M, num_warps=key_blocks.warps, num_stages=key_blocks.stages,
        )  # fmt: skip
        N = query_blocks.keys
        device._attention_query_grad_kernel[(tiles, count * group)](
            k.main(N), k.rest(N), grad_q.main(TILE), grad_q.rest(TILE), TensorDescriptor.from_tensor(scores_grad, [N, TILE]),
            first, slot, slots, head, k.head, grad_q.head, scale,
            **shape, STEP=N, num_warps=query_blocks.warps, num_stages=query_blocks.stages,
        )  # fmt: skip
    grad_q_BHSD, grad_k_BHSD, grad_v_BHSD = (x.transpose(1, 2) for x in grads_BSHD)
    return grad_q_BHSD, grad_k_BHSD, grad_v_BHSD


@op("document_attention")
def _document_attention(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, first_T: Tensor, last_T: Tensor, slot: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _launch_forward(q_BHSD, k_BHSD, v_BHSD, first_T, scale)


@torch.library.register_fake(_document_attention)
def _(q_BHSD, k_BHSD, v_BHSD, first_T, last_T, slot, scale):
    B, H, S, _ = q_BHSD.shape
    out_BSHD = q_BHSD.new_empty(B, S, H, v_BHSD.shape[-1])
    return out_BSHD.transpose(1, 2), q_BHSD.new_empty(H, B * S, dtype=torch.float32)


@op("document_attention_backward")
def _document_attention_backward(
    grad_BHSD: Tensor, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, out_BHSD: Tensor, lse_HT: Tensor,
    first_T: Tensor, last_T: Tensor, slot: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _launch_backward(grad_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_HT, Documents(first_T, last_T, slot), scale)


@torch.library.register_fake(_document_attention_backward)
def _(grad_BHSD, q_BHSD, k_BHSD, v_BHSD, out_BHSD, lse_HT, first_T, last_T, slot, scale):
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q_BHSD, k_BHSD, v_BHSD))


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_BHSD, _):
    q, k, v, first_T, last_T, slot, out, lse = ctx.saved_tensors
    grads = _document_attention_backward(grad_BHSD, q, k, v, out, lse, first_T, last_T, slot, ctx.scale)
    return *grads, None, None, None, None


torch.library.register_autograd(_document_attention, _backward, setup_context=_save)


def document_attention(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, documents: Documents, scale: float) -> Tensor:
    """Every token attends to its document up to itself.

    The kernels take bf16 and fp16 on GPUs with the shared memory of Hopper, in heads of :func:`supports_widths`; all else goes
    through torch's attention with a mask. They form products in the dtype, sums and the softmax in fp32, the same on every run.
    Their backward pass takes up to 2 GiB (or the tiles of one key head, if more) for the gradient of the scores while it runs.

    Args:
        q_BHSD: [B, H, S, D].
        k_BHSD: [B, Hk, S, D], Hk a divisor of H.
        v_BHSD: [B, Hk, S, DV].
        documents: of all B * S tokens.
        scale: of the scores before the softmax.
    Returns:
        [B, H, S, DV]; from the kernels stored as [B, S, H, DV].
    """
    if not _runs_in_kernels(q_BHSD, v_BHSD):
        return document_attention_reference(q_BHSD, k_BHSD, v_BHSD, documents.first_T, scale)
    return _document_attention(q_BHSD, k_BHSD, v_BHSD, *documents, scale)[0]
