"""The Triton kernels of :mod:`kernels.route`, which says what each computes."""

import triton
import triton.language as tl

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
