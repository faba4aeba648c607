"""The router: gate product, scores and top-K choice in one kernel, and its gradient in three launches, all in fp32.

The gate's products run on the tensor cores in fp32's precision: with bf16 tokens as products with the two or three bf16 parts
that an fp32 number splits into, else as three TF32 products. A plain fp32 GEMM of these shapes is many times slower. The parts
are made once by a launch of their own, so that the products' loops only load and multiply.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.op import op
from kernels.route_kernels import _gate_grad_kernel, _logits_grad_kernel, _route_kernel, _split_kernel

COUNTED_TOKENS = 64
"""Tokens in a block whose choices the router counts for :func:`kernels.sort.sort_pairs`."""


@dataclass(frozen=True)
class RouteOptions:
    """How scores are made and experts chosen; ``groups`` 0 is no node limit."""

    top_k: int
    softmax: bool
    normalize: bool
    scale: float
    groups: int = 0
    limited_groups: int = 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def largest(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, ties to the lower index, which ``torch.topk`` leaves to the device: [T, k] int64."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def choose_reference(scores_TE: Tensor, bias_E: Tensor | None, options: RouteOptions) -> Tensor:
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if options.groups:
        choice_TGe = choice_TE.unflatten(1, (options.groups, -1))
        group_score_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
        kept_TG.scatter_(1, largest(group_score_TG, options.limited_groups), True)
        choice_TE = choice_TGe.masked_fill(~kept_TG[:, :, None], -torch.inf).flatten(1)
    return largest(choice_TE, options.top_k)


def route_reference(
    x_TD: Tensor,
    gate_ED: Tensor,
    gate_bias_E: Tensor | None,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    chosen_TK: Tensor | None,
    options: RouteOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    E = gate_ED.shape[0]
    wide = _wide(x_TD.dtype)
    logits_TE = x_TD.to(wide) @ gate_ED.to(wide).t()
    if gate_bias_E is not None:
        logits_TE = logits_TE + gate_bias_E.to(wide)
    scores_TE = logits_TE.softmax(-1) if options.softmax else logits_TE.sigmoid()
    experts_TK = choose_reference(scores_TE.detach(), bias_E, options) if chosen_TK is None else chosen_TK.long()
    if valid_T is not None:
        experts_TK = torch.where(valid_T[:, None], experts_TK, E)
    weights_TK = scores_TE.gather(1, experts_TK.clamp(max=E - 1))
    if options.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    weights_TK = torch.where(experts_TK < E, weights_TK * options.scale, 0)
    return experts_TK, weights_TK, scores_TE


def block_counts_reference(experts_TK: Tensor, num_experts: int) -> Tensor:
    counts_TE = torch.nn.functional.one_hot(experts_TK, num_experts + 1)[:, :, :-1].sum(1)
    padding = -len(experts_TK) % COUNTED_TOKENS
    return torch.nn.functional.pad(counts_TE, (0, 0, 0, padding)).unflatten(0, (-1, COUNTED_TOKENS)).sum(1).int()


def _paddings(E: int, K: int) -> dict[str, int]:
    return {"E_P": max(triton.next_power_of_2(E), 16), "K": K, "K_P": triton.next_power_of_2(K)}


def _tile(x_TD: Tensor, E: int, limited: bool) -> dict[str, int]:
    """Tile, warps and stages of the router by tokens, experts and whether there are node limits, which need registers (sm_90)."""
    if x_TD.dtype != torch.bfloat16:
        return {"BLOCK_T": 64 if E <= 256 else 32, "BLOCK_D": 32, "num_warps": 4 if E <= 128 else 8}
    if E <= 64:
        return {"BLOCK_T": 64, "BLOCK_D": 64, "num_warps": 4, "num_stages": 4 if E <= 32 else 3}
    if E <= 128:
        many = len(x_TD) > 8192 and not limited
        return {"BLOCK_T": 128 if many else 64, "BLOCK_D": 64, "num_warps": 8 if many or limited else 4, "num_stages": 3}
    return {"BLOCK_T": 64 if E <= 256 else 32, "BLOCK_D": 32, "num_warps": 8, "num_stages": 3}


def _backward_tile(x_TD: Tensor, E: int) -> dict[str, int]:
    if x_TD.dtype != torch.bfloat16:
        return {"BLOCK_T": 64 if E <= 64 else 32, "BLOCK_D": 32, "num_warps": 4 if E <= 128 else 8}
    if E <= 128:
        return {"BLOCK_T": 64, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_T": 64 if E <= 256 else 32, "BLOCK_D": 32, "num_warps": 8, "num_stages": 3}


def _split(gate_ED: Tensor, E_P: int, parts: int) -> Tensor:
    """The gate's leading bf16 parts [parts, E_P, D_P], padded by zeros to whole tiles."""
    E, D = gate_ED.shape
    parts_PED = gate_ED.new_empty(parts, E_P, triton.cdiv(D, 128) * 128, dtype=torch.bfloat16)
    grid = E_P, triton.cdiv(parts_PED.shape[2], 1024)
    _split_kernel[grid](gate_ED, parts_PED, E, D, parts_PED.shape[2], PARTS=parts, BLOCK_D=1024, num_warps=4)
    return parts_PED


def _launch_route(x_TD, gate_ED, gate_bias_E, bias_E, valid_T, chosen_TK, options: RouteOptions) -> tuple[Tensor, ...]:
    (T, D), E, K = x_TD.shape, gate_ED.shape[0], options.top_k
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    chosen_TK = None if chosen_TK is None else chosen_TK.contiguous()
    experts_TK = x_TD.new_empty(T, K, dtype=torch.int64)
    weights_TK, scores_TE = x_TD.new_empty(T, K, dtype=torch.float32), x_TD.new_empty(T, E, dtype=torch.float32)
    tile, pads, gate = _tile(x_TD, E, options.groups > 0), _paddings(E, K), gate_ED.contiguous()
    # Tiles of fewer tokens than are counted together add their counts up.
    new_counts = x_TD.new_zeros if tile["BLOCK_T"] < COUNTED_TOKENS else x_TD.new_empty
    block_counts = new_counts(triton.cdiv(T, COUNTED_TOKENS), E, dtype=torch.int32)
    if T:
        if x_TD.dtype == torch.bfloat16:
            gate = _split(gate, pads["E_P"], 3)
        _route_kernel[(triton.cdiv(T, tile["BLOCK_T"]),)](
            x_TD, gate, gate_bias_E, bias_E, valid_T, chosen_TK, experts_TK, weights_TK, scores_TE, block_counts,
            T, D, gate.shape[-1], E, x_TD.stride(0), options.scale,
            SOFTMAX=options.softmax, NORMALIZE=options.normalize, GROUPS=options.groups,
            GROUPS_P=triton.next_power_of_2(max(options.groups, 1)), LIMITED=options.limited_groups,
            EVEN_D=D % tile["BLOCK_D"] == 0, COUNTED_T=COUNTED_TOKENS, **tile, **pads,
        )  # fmt: skip
    return experts_TK, weights_TK, scores_TE, block_counts


def _launch_route_backward(
    grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, options: RouteOptions
) -> tuple[Tensor, Tensor, Tensor]:
    (T, D), E, in_parts = x_TD.shape, gate_ED.shape[0], x_TD.dtype == torch.bfloat16
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    pads, tile, gate = _paddings(E, options.top_k), _backward_tile(x_TD, E), gate_ED.contiguous()
    grad_logits_TE, grad_x_TD = torch.empty_like(scores_TE), x_TD.new_empty(T, D)
    parts_PTE = x_TD.new_empty(2, T, pads["E_P"]) if in_parts else None
    if T:
        if in_parts:
            gate = _split(gate, pads["E_P"], 2)
        _logits_grad_kernel[(triton.cdiv(T, tile["BLOCK_T"]),)](
            grad_weights_TK.contiguous(), None if grad_scores_TE is None else grad_scores_TE.contiguous(),
            scores_TE, experts_TK, gate, grad_logits_TE, parts_PTE, grad_x_TD, T, D, gate.shape[-1], E, options.scale,
            SOFTMAX=options.softmax, NORMALIZE=options.normalize, **tile, **pads,
        )  # fmt: skip
    slices = max(min(8 if in_parts else 32, T // 64), 1)
    partial_CED = x_TD.new_empty(slices, E, D, dtype=torch.float32)
    block_e, block_d, warps = min(pads["E_P"], 128), 32, 4
    if in_parts:
        block_d, warps = (64, 4) if E <= 64 else (128, 8)
    _gate_grad_kernel[(triton.cdiv(D, block_d), slices, triton.cdiv(E, block_e))](
        parts_PTE if in_parts else grad_logits_TE, x_TD, partial_CED, T, D, E, x_TD.stride(0), triton.cdiv(T, slices),
        E_P=pads["E_P"], BLOCK_E=block_e, BLOCK_T=64 if in_parts else 32, BLOCK_D=block_d, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return grad_logits_TE, grad_x_TD, partial_CED.sum(0)


def route_backward_reference(
    grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, options: RouteOptions
) -> tuple[Tensor, Tensor, Tensor]:
    E, wide = gate_ED.shape[0], scores_TE.dtype
    routed_TK = experts_TK < E
    slot_TK = experts_TK.clamp(max=E - 1)
    grad_TK = torch.where(routed_TK, grad_weights_TK * options.scale, 0)
    if options.normalize:
        picked_TK = torch.where(routed_TK, scores_TE.gather(1, slot_TK), 0)
        total_T1 = picked_TK.sum(1, keepdim=True) + 1e-20
        grad_TK = (grad_TK - (grad_TK * picked_TK).sum(1, keepdim=True) / total_T1) / total_T1
    grad_TE = torch.zeros_like(scores_TE) if grad_scores_TE is None else grad_scores_TE.clone()
    grad_TE.scatter_add_(1, slot_TK, torch.where(routed_TK, grad_TK, 0).to(wide))
    if options.softmax:
        grad_TE = scores_TE * (grad_TE - (grad_TE * scores_TE).sum(1, keepdim=True))
    else:
        grad_TE = grad_TE * scores_TE * (1 - scores_TE)
    return grad_TE, (grad_TE @ gate_ED.to(wide)).to(x_TD.dtype), grad_TE.t() @ x_TD.to(wide)


def _on_tensor_cores(x_TD: Tensor) -> bool:
    return x_TD.is_cuda and x_TD.dtype != torch.float64


@op("route")
def _route(
    x_TD: Tensor,
    gate_ED: Tensor,
    gate_bias_E: Tensor | None,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    chosen_TK: Tensor | None,
    top_k: int,
    softmax: bool,
    normalize: bool,
    scale: float,
    groups: int,
    limited_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = RouteOptions(top_k, softmax, normalize, scale, groups, limited_groups)
    arguments = (x_TD, gate_ED, gate_bias_E, bias_E, valid_T, chosen_TK, options)
    if _on_tensor_cores(x_TD):
        experts_TK, weights_TK, scores_TE, block_counts = _launch_route(*arguments)
    else:
        experts_TK, weights_TK, scores_TE = route_reference(*arguments)
        # What an op returns may not alias what it was given.
        experts_TK = experts_TK.clone(memory_format=torch.contiguous_format)
        block_counts = block_counts_reference(experts_TK, gate_ED.shape[0])
    return weights_TK, scores_TE, experts_TK, block_counts


@torch.library.register_fake(_route)
def _(x_TD, gate_ED, gate_bias_E, bias_E, valid_T, chosen_TK, top_k, softmax, normalize, scale, groups, limited_groups):
    (T, _), E, wide = x_TD.shape, gate_ED.shape[0], _wide(x_TD.dtype)
    weights_TK, scores_TE = x_TD.new_empty(T, top_k, dtype=wide), x_TD.new_empty(T, E, dtype=wide)
    block_counts = x_TD.new_empty((T + COUNTED_TOKENS - 1) // COUNTED_TOKENS, E, dtype=torch.int32)
    return weights_TK, scores_TE, x_TD.new_empty(T, top_k, dtype=torch.int64), block_counts


@op("route_backward")
def _route_backward(
    grad_weights_TK: Tensor,
    grad_scores_TE: Tensor | None,
    scores_TE: Tensor,
    experts_TK: Tensor,
    x_TD: Tensor,
    gate_ED: Tensor,
    top_k: int,
    softmax: bool,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = RouteOptions(top_k, softmax, normalize, scale)
    compute = _launch_route_backward if _on_tensor_cores(x_TD) else route_backward_reference
    return compute(grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, options)


@torch.library.register_fake(_route_backward)
def _(grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, top_k, softmax, normalize, scale):
    return torch.empty_like(scores_TE), torch.empty_like(x_TD), gate_ED.new_empty(gate_ED.shape, dtype=scores_TE.dtype)


class _Route(torch.autograd.Function):
    """What ``torch.library.register_autograd`` would make of the two operators, at less of the host's time."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, gate_ED: Tensor, gate_bias_E: Tensor | None, *others) -> tuple[Tensor, ...]:
        weights_TK, scores_TE, experts_TK, block_counts = _route(x_TD, gate_ED, gate_bias_E, *others)
        ctx.options, ctx.has_gate_bias = others[3:7], gate_bias_E is not None
        ctx.mark_non_differentiable(experts_TK, block_counts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, gate_ED, experts_TK, scores_TE)
        return weights_TK, scores_TE, experts_TK, block_counts

    @staticmethod
    def backward(ctx, grad_weights_TK: Tensor | None, grad_scores_TE: Tensor | None, *_) -> tuple[Tensor | None, ...]:
        x_TD, gate_ED, experts_TK, scores_TE = ctx.saved_tensors
        if grad_weights_TK is None:
            grad_weights_TK = torch.zeros_like(experts_TK, dtype=scores_TE.dtype)
        grad_logits_TE, grad_x_TD, grad_gate_ED = _route_backward(
            grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, *ctx.options
        )
        grad_bias_E = grad_logits_TE.sum(0) if ctx.has_gate_bias else None
        return grad_x_TD, grad_gate_ED.to(gate_ED.dtype), grad_bias_E, *[None] * 9


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    options: RouteOptions,
    *,
    gate_bias_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    valid_T: Tensor | None = None,
    chosen_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores every expert for every token, chooses K of them and weighs them.

    Args:
        x_TD: tokens of any floating dtype; the arithmetic is fp32 (fp64 for fp64).
        gate_ED: fp32 gate weight; ``gate_bias_E`` its bias.
        bias_E: fp32 expert bias, added to the scores for the choice alone (arXiv 2408.15664).
        valid_T: bool; the others are not routed.
        chosen_TK: experts to take instead of choosing.
    Returns:
        ``experts_TK`` int64, best first and ties to the lower index, E for tokens not routed; ``weights_TK`` fp32, zero there;
        ``scores_TE`` fp32; ``block_counts`` int32: how often each expert was chosen by every ``COUNTED_TOKENS`` tokens.
        Weights and scores are differentiable to x, gate and gate bias.
    """
    o = options
    weights_TK, scores_TE, experts_TK, block_counts = _Route.apply(
        x_TD,
        gate_ED,
        gate_bias_E,
        bias_E,
        valid_T,
        chosen_TK,
        o.top_k,
        o.softmax,
        o.normalize,
        o.scale,
        o.groups,
        o.limited_groups,
    )
    return experts_TK, weights_TK, scores_TE, block_counts
