"""The router: gate product, scores and top-K choice in one kernel, and its gradient in three launches, all in fp32.

The gate's products run on the tensor cores in fp32's precision: with bf16 tokens as products with the two or three bf16 parts
that an fp32 number splits into, else as three TF32 products. A plain fp32 GEMM of these shapes is many times slower.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

COUNTED_TOKENS = 16
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
    counts_TE = torch.nn.functional.one_hot(experts_TK, num_experts + 1).sum(1)
    padding = -len(experts_TK) % COUNTED_TOKENS
    return torch.nn.functional.pad(counts_TE, (0, 0, 0, padding)).unflatten(0, (-1, COUNTED_TOKENS)).sum(1).int()


# The choice that an expert outside of the eligible ones presents; a chosen one then presents -inf.
OUT_OF_REACH = tl.constexpr(-3e38)


@triton.jit
def _limit_groups(choice_TE, e_E, E, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, LIMITED: tl.constexpr, BLOCK_T: tl.constexpr):
    """Leaves the experts of the LIMITED groups whose two best sum highest; all others become OUT_OF_REACH."""
    g_G = tl.arange(0, GROUPS_P)
    group_E = e_E // (E // GROUPS)
    strength_TG = tl.full([BLOCK_T, GROUPS_P], -float("inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        inside_TE = tl.where((group_E == g)[None, :], choice_TE, -float("inf"))
        first_T = tl.max(inside_TE, axis=1)
        at_T = tl.min(tl.where(inside_TE == first_T[:, None], e_E[None, :], E), axis=1)
        second_T = tl.max(tl.where(e_E[None, :] == at_T[:, None], -float("inf"), inside_TE), axis=1)
        strength_TG = tl.where((g_G == g)[None, :], (first_T + second_T)[:, None], strength_TG)
    kept_TE = choice_TE != choice_TE
    for _ in tl.static_range(LIMITED):
        best_T = tl.max(strength_TG, axis=1)
        at_T = tl.min(tl.where(strength_TG == best_T[:, None], g_G[None, :], GROUPS_P), axis=1)
        strength_TG = tl.where(g_G[None, :] == at_T[:, None], -float("inf"), strength_TG)
        kept_TE = kept_TE | (group_E[None, :] == at_T[:, None])
    return tl.where(kept_TE, choice_TE, OUT_OF_REACH)


@triton.jit
def _split(x):
    """fp32 as a sum of three bf16, to all of its 24 bits."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _route_kernel(
    x_ptr, gate_ptr, gate_bias_ptr, bias_ptr, valid_ptr, chosen_ptr, experts_ptr, weights_ptr, scores_ptr, block_counts_ptr,
    T, D, E, stride_x, scale,
    K: tl.constexpr, K_P: tl.constexpr, E_P: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, COUNTED_T: tl.constexpr,
):  # fmt: skip
    t_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e_E, d_D, k_K = tl.arange(0, E_P), tl.arange(0, BLOCK_D), tl.arange(0, K_P)
    in_T, in_E, in_TK = t_T < T, e_E < E, (t_T < T)[:, None] & (k_K < K)[None, :]
    logits_TE = tl.zeros([BLOCK_T, E_P], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + d_D
        x_TD = tl.load(x_ptr + t_T[:, None] * stride_x + d[None, :], mask=in_T[:, None] & (d < D)[None, :], other=0.0)
        gate_ED = tl.load(gate_ptr + e_E[:, None] * D + d[None, :], mask=in_E[:, None] & (d < D)[None, :], other=0.0)
        if x_TD.dtype == tl.bfloat16:
            high_ED, middle_ED, low_ED = _split(gate_ED)
            # Tensor cores truncate as they accumulate; adding up short products outside of them keeps fp32's precision.
            part_TE = tl.dot(x_TD, tl.trans(low_ED))
            part_TE = tl.dot(x_TD, tl.trans(middle_ED), part_TE)
            logits_TE += tl.dot(x_TD, tl.trans(high_ED), part_TE)
        else:
            logits_TE = tl.dot(x_TD.to(tl.float32), tl.trans(gate_ED), logits_TE, input_precision="tf32x3")
    if gate_bias_ptr is not None:
        logits_TE += tl.load(gate_bias_ptr + e_E, mask=in_E, other=0.0)[None, :]
    if SOFTMAX:
        logits_TE = tl.where(in_E[None, :], logits_TE, -float("inf"))
        exp_TE = tl.exp(logits_TE - tl.max(logits_TE, axis=1)[:, None])
        scores_TE = exp_TE / tl.sum(exp_TE, axis=1)[:, None]
    else:
        scores_TE = tl.where(in_E[None, :], 1 / (1 + tl.exp(-logits_TE)), 0.0)
    tl.store(scores_ptr + t_T[:, None] * E + e_E[None, :], scores_TE, mask=in_T[:, None] & in_E[None, :])

    choice_TE = scores_TE
    if bias_ptr is not None:
        choice_TE += tl.load(bias_ptr + e_E, mask=in_E, other=0.0)[None, :]
    choice_TE = tl.where(in_E[None, :], choice_TE, OUT_OF_REACH)
    if GROUPS > 0:
        choice_TE = _limit_groups(choice_TE, e_E, E, GROUPS, GROUPS_P, LIMITED, BLOCK_T)
    experts_TK = tl.zeros([BLOCK_T, K_P], tl.int32)
    if chosen_ptr is not None:
        experts_TK = tl.load(chosen_ptr + t_T[:, None] * K + k_K[None, :], mask=in_TK, other=E).to(tl.int32)
    weights_TK = tl.zeros([BLOCK_T, K_P], tl.float32)
    routed_T = in_T
    if valid_ptr is not None:
        routed_T = in_T & (tl.load(valid_ptr + t_T, mask=in_T, other=0) != 0)
    for k in tl.static_range(K):
        here_K = (k_K == k)[None, :]
        if chosen_ptr is not None:
            at_T = tl.sum(tl.where(here_K, experts_TK, 0), axis=1)
        else:
            # The first of the largest: ties go to the lower index.
            best_T = tl.max(choice_TE, axis=1)
            at_T = tl.min(tl.where(choice_TE == best_T[:, None], e_E[None, :], E), axis=1)
            experts_TK = tl.where(here_K, at_T[:, None], experts_TK)
        at_TE = e_E[None, :] == at_T[:, None]
        choice_TE = tl.where(at_TE, -float("inf"), choice_TE)
        score_T = tl.sum(tl.where(at_TE, scores_TE, 0.0), axis=1)
        weights_TK = tl.where(here_K, score_T[:, None], weights_TK)
    if NORMALIZE:
        weights_TK = weights_TK / (tl.sum(weights_TK, axis=1) + 1e-20)[:, None]
    experts_TK = tl.where(routed_T[:, None], experts_TK, E)
    weights_TK = tl.where(experts_TK < E, weights_TK * scale, 0.0)
    tl.store(experts_ptr + t_T[:, None] * K + k_K[None, :], experts_TK.to(tl.int64), mask=in_TK)
    tl.store(weights_ptr + t_T[:, None] * K + k_K[None, :], weights_TK, mask=in_TK)
    taken_TE = (choice_TE == -float("inf")) & routed_T[:, None]
    counts_SE = tl.sum(tl.reshape(taken_TE.to(tl.int32), [BLOCK_T // COUNTED_T, COUNTED_T, E_P]), axis=1)
    s_S = tl.program_id(0) * (BLOCK_T // COUNTED_T) + tl.arange(0, BLOCK_T // COUNTED_T)
    in_S = s_S * COUNTED_T < T
    tl.store(block_counts_ptr + s_S[:, None] * (E + 1) + e_E[None, :], counts_SE, mask=in_S[:, None] & in_E[None, :])
    pairs_S = tl.minimum(T - s_S * COUNTED_T, COUNTED_T) * K
    tl.store(block_counts_ptr + s_S * (E + 1) + E, pairs_S - tl.sum(counts_SE, axis=1), mask=in_S)


@triton.jit
def _logits_grad_kernel(
    grad_weights_ptr, grad_scores_ptr, scores_ptr, experts_ptr, gate_ptr, grad_logits_ptr, grad_x_ptr,
    T, D, E, scale,
    K: tl.constexpr, K_P: tl.constexpr, E_P: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e_E, d_D, k_K = tl.arange(0, E_P), tl.arange(0, BLOCK_D), tl.arange(0, K_P)
    in_T, in_E = t_T < T, e_E < E
    in_TE, in_TK = in_T[:, None] & in_E[None, :], in_T[:, None] & (k_K < K)[None, :]
    scores_TE = tl.load(scores_ptr + t_T[:, None] * E + e_E[None, :], mask=in_TE, other=0.0)
    experts_TK = tl.load(experts_ptr + t_T[:, None] * K + k_K[None, :], mask=in_TK, other=E).to(tl.int32)
    grad_TK = tl.load(grad_weights_ptr + t_T[:, None] * K + k_K[None, :], mask=in_TK, other=0.0)
    grad_TK = tl.where(experts_TK < E, grad_TK * scale, 0.0)
    if NORMALIZE:
        picked_TK = tl.zeros([BLOCK_T, K_P], tl.float32)
        for k in tl.static_range(K):
            at_T = tl.sum(tl.where((k_K == k)[None, :], experts_TK, 0), axis=1)
            score_T = tl.sum(tl.where(e_E[None, :] == at_T[:, None], scores_TE, 0.0), axis=1)
            picked_TK = tl.where((k_K == k)[None, :], score_T[:, None], picked_TK)
        total_T = tl.sum(picked_TK, axis=1) + 1e-20
        mean_T = tl.sum(grad_TK * picked_TK, axis=1) / total_T
        grad_TK = (grad_TK - mean_T[:, None]) / total_T[:, None]
    grad_TE = tl.zeros([BLOCK_T, E_P], tl.float32)
    if grad_scores_ptr is not None:
        grad_TE = tl.load(grad_scores_ptr + t_T[:, None] * E + e_E[None, :], mask=in_TE, other=0.0)
    for k in tl.static_range(K):
        at_T = tl.sum(tl.where((k_K == k)[None, :], experts_TK, 0), axis=1)
        grad_T = tl.sum(tl.where((k_K == k)[None, :], grad_TK, 0.0), axis=1)
        grad_TE += tl.where(e_E[None, :] == at_T[:, None], grad_T[:, None], 0.0)
    if SOFTMAX:
        grad_TE = scores_TE * (grad_TE - tl.sum(grad_TE * scores_TE, axis=1)[:, None])
    else:
        grad_TE = grad_TE * scores_TE * (1 - scores_TE)
    tl.store(grad_logits_ptr + t_T[:, None] * E + e_E[None, :], grad_TE, mask=in_TE)
    high_TE, middle_TE, low_TE = _split(grad_TE)
    for start in range(0, D, BLOCK_D):
        d = start + d_D
        gate_ED = tl.load(gate_ptr + e_E[:, None] * D + d[None, :], mask=in_E[:, None] & (d < D)[None, :], other=0.0)
        if grad_x_ptr.dtype.element_ty == tl.bfloat16:
            # 16 bits of each factor are more than the result keeps.
            high_ED, middle_ED, low_ED = _split(gate_ED)
            grad_TD = tl.dot(middle_TE, high_ED)
            grad_TD = tl.dot(high_TE, middle_ED, grad_TD)
            grad_TD = tl.dot(high_TE, high_ED, grad_TD)
        else:
            grad_TD = tl.dot(grad_TE, gate_ED, input_precision="tf32x3")
        grad_ptr_TD = grad_x_ptr + t_T[:, None] * D + d[None, :]
        tl.store(grad_ptr_TD, grad_TD.to(grad_x_ptr.dtype.element_ty), mask=in_T[:, None] & (d < D)[None, :])


@triton.jit
def _gate_grad_kernel(
    grad_logits_ptr, x_ptr, partial_ptr, T, D, E, stride_x, slice_T,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of the gate over one slice of the tokens; the slices are added afterwards, in order."""
    d_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.program_id(1).to(tl.int64)
    e_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_E, in_D = e_E < E, d_D < D
    total_ED = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for start in range(0, slice_T, BLOCK_T):
        i_T = start + tl.arange(0, BLOCK_T)
        t_T = part * slice_T + i_T
        in_T = (t_T < T) & (i_T < slice_T)
        grad_TE = tl.load(grad_logits_ptr + t_T[:, None] * E + e_E[None, :], mask=in_T[:, None] & in_E[None, :], other=0.0)
        x_TD = tl.load(x_ptr + t_T[:, None] * stride_x + d_D[None, :], mask=in_T[:, None] & in_D[None, :], other=0.0)
        if x_TD.dtype == tl.bfloat16:
            high_TE, middle_TE, low_TE = _split(grad_TE)
            part_ED = tl.dot(tl.trans(low_TE), x_TD)
            part_ED = tl.dot(tl.trans(middle_TE), x_TD, part_ED)
            total_ED += tl.dot(tl.trans(high_TE), x_TD, part_ED)
        else:
            total_ED = tl.dot(tl.trans(grad_TE), x_TD.to(tl.float32), total_ED, input_precision="tf32x3")
    ptr_ED = partial_ptr + (part * E + e_E[:, None]) * D + d_D[None, :]
    tl.store(ptr_ED, total_ED, mask=in_E[:, None] & in_D[None, :])


def _paddings(E: int, K: int) -> dict[str, int]:
    return {"E_P": max(triton.next_power_of_2(E), 16), "K": K, "K_P": triton.next_power_of_2(K)}


def _block_t(E: int) -> int:
    return 64 if E <= 256 else 16


def _warps(E: int) -> int:
    # Several [BLOCK_T, E] tiles live in registers at once.
    return 4 if E <= 64 else 8


def _block_d(x_TD: Tensor, E: int) -> int:
    return 64 if x_TD.dtype == torch.bfloat16 and E <= 128 else 32


def _launch_route(x_TD, gate_ED, gate_bias_E, bias_E, valid_T, chosen_TK, options: RouteOptions):
    (T, D), E, K = x_TD.shape, gate_ED.shape[0], options.top_k
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    chosen_TK = None if chosen_TK is None else chosen_TK.contiguous()
    experts_TK = x_TD.new_empty(T, K, dtype=torch.int64)
    weights_TK, scores_TE = x_TD.new_empty(T, K, dtype=torch.float32), x_TD.new_empty(T, E, dtype=torch.float32)
    block_counts = x_TD.new_empty(triton.cdiv(T, COUNTED_TOKENS), E + 1, dtype=torch.int32)
    block = _block_t(E)
    if T:
        _route_kernel[(triton.cdiv(T, block),)](
            x_TD, gate_ED.contiguous(), gate_bias_E, bias_E, valid_T, chosen_TK, experts_TK, weights_TK, scores_TE, block_counts,
            T, D, E, x_TD.stride(0), options.scale,
            SOFTMAX=options.softmax, NORMALIZE=options.normalize, GROUPS=options.groups,
            GROUPS_P=triton.next_power_of_2(max(options.groups, 1)), LIMITED=options.limited_groups,
            BLOCK_T=block, BLOCK_D=_block_d(x_TD, E), COUNTED_T=COUNTED_TOKENS, num_warps=_warps(E), **_paddings(E, K),
        )  # fmt: skip
    return experts_TK, weights_TK, scores_TE, block_counts


def _launch_route_backward(grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, options: RouteOptions):
    (T, D), E = x_TD.shape, gate_ED.shape[0]
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    gate_ED = gate_ED.contiguous()
    grad_logits_TE, grad_x_TD = torch.empty_like(scores_TE), x_TD.new_empty(T, D)
    pads, block = _paddings(E, options.top_k), _block_t(E)
    slices = max(min(32, T // 64), 1)
    partial_CED = x_TD.new_empty(slices, E, D, dtype=torch.float32)
    if T:
        _logits_grad_kernel[(triton.cdiv(T, block),)](
            grad_weights_TK.contiguous(), None if grad_scores_TE is None else grad_scores_TE.contiguous(),
            scores_TE, experts_TK, gate_ED, grad_logits_TE, grad_x_TD, T, D, E, options.scale,
            SOFTMAX=options.softmax, NORMALIZE=options.normalize, BLOCK_T=block, BLOCK_D=_block_d(x_TD, E),
            num_warps=_warps(E), **pads,
        )  # fmt: skip
    block_e, block_d = min(pads["E_P"], 128), _block_d(x_TD, E)
    _gate_grad_kernel[(triton.cdiv(D, block_d), slices, triton.cdiv(E, block_e))](
        grad_logits_TE, x_TD, partial_CED, T, D, E, x_TD.stride(0), triton.cdiv(T, slices),
        BLOCK_E=block_e, BLOCK_T=32, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return grad_logits_TE, grad_x_TD, partial_CED.sum(0)


def route_backward_reference(grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, options: RouteOptions):
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


@torch.library.custom_op("moe_titan::route", mutates_args=())
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


@_route.register_fake
def _(x_TD, gate_ED, gate_bias_E, bias_E, valid_T, chosen_TK, top_k, softmax, normalize, scale, groups, limited_groups):
    (T, _), E, wide = x_TD.shape, gate_ED.shape[0], _wide(x_TD.dtype)
    weights_TK, scores_TE = x_TD.new_empty(T, top_k, dtype=wide), x_TD.new_empty(T, E, dtype=wide)
    block_counts = x_TD.new_empty((T + COUNTED_TOKENS - 1) // COUNTED_TOKENS, E + 1, dtype=torch.int32)
    return weights_TK, scores_TE, x_TD.new_empty(T, top_k, dtype=torch.int64), block_counts


@torch.library.custom_op("moe_titan::route_backward", mutates_args=())
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


@_route_backward.register_fake
def _(grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, top_k, softmax, normalize, scale):
    return torch.empty_like(scores_TE), torch.empty_like(x_TD), gate_ED.new_empty(gate_ED.shape, dtype=scores_TE.dtype)


def _setup_context(ctx, inputs, output) -> None:
    x_TD, gate_ED, gate_bias_E, _, _, _, *options = inputs
    _, scores_TE, experts_TK, block_counts = output
    ctx.options, ctx.has_gate_bias = options[:4], gate_bias_E is not None
    ctx.mark_non_differentiable(experts_TK, block_counts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TD, gate_ED, experts_TK, scores_TE)


def _backward(ctx, grad_weights_TK: Tensor | None, grad_scores_TE: Tensor | None, *_):
    x_TD, gate_ED, experts_TK, scores_TE = ctx.saved_tensors
    if grad_weights_TK is None:
        grad_weights_TK = torch.zeros_like(experts_TK, dtype=scores_TE.dtype)
    grad_logits_TE, grad_x_TD, grad_gate_ED = _route_backward(
        grad_weights_TK, grad_scores_TE, scores_TE, experts_TK, x_TD, gate_ED, *ctx.options
    )
    grad_bias_E = grad_logits_TE.sum(0) if ctx.has_gate_bias else None
    return grad_x_TD, grad_gate_ED.to(gate_ED.dtype), grad_bias_E, *[None] * 9


_route.register_autograd(_backward, setup_context=_setup_context)


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
        ``scores_TE`` fp32; ``block_counts`` int32: how often each expert, or none (the last), was chosen by every
        ``COUNTED_TOKENS`` tokens. Weights and scores are differentiable to x, gate and gate bias.
    """
    o = options
    weights_TK, scores_TE, experts_TK, block_counts = _route(
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
