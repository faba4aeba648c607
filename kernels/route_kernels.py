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
def _split_kernel(gate_ptr, parts_ptr, E, D, D_P, PARTS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The leading bf16 parts whose sum is the fp32 gate: [PARTS, E_P, D_P], zero outside of the gate; a program makes one row."""
    e, d_D = tl.program_id(0), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    rest_D = tl.load(gate_ptr + e * D + d_D, mask=(d_D < D) & (e < E), other=0.0)
    for part in tl.static_range(PARTS):
        part_D = rest_D.to(tl.bfloat16)
        tl.store(parts_ptr + (part * tl.num_programs(0) + e) * D_P + d_D, part_D, mask=d_D < D_P)
        rest_D -= part_D.to(tl.float32)


@triton.jit
def _logits(
    x_ptr, gate_ptr, t_T, e_E, T, D, D_P, E, stride_x,
    E_P: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x @ gate^T; the gate comes in its bf16 parts for bf16 tokens, else in fp32. Tokens past T repeat the last one."""
    d_D = tl.arange(0, BLOCK_D)
    x_ptr_TD = x_ptr + tl.minimum(t_T, T - 1)[:, None] * stride_x + d_D[None, :]
    logits_TE = tl.zeros([BLOCK_T, E_P], tl.float32)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        high_ptr_DE = gate_ptr + e_E[None, :] * D_P + d_D[:, None]
        middle_ptr_DE, low_ptr_DE = high_ptr_DE + E_P * D_P, high_ptr_DE + 2 * E_P * D_P
        for start in range(0, D, BLOCK_D):
            if EVEN_D:
                x_TD = tl.load(x_ptr_TD + start)
            else:
                x_TD = tl.load(x_ptr_TD + start, mask=(start + d_D < D)[None, :], other=0.0)
            # Tensor cores truncate as they accumulate; adding up short products outside of them keeps fp32's precision.
            part_TE = tl.dot(x_TD, tl.load(low_ptr_DE + start))
            part_TE = tl.dot(x_TD, tl.load(middle_ptr_DE + start), part_TE)
            logits_TE += tl.dot(x_TD, tl.load(high_ptr_DE + start), part_TE)
    else:
        for start in range(0, D, BLOCK_D):
            in_D = start + d_D < D
            x_TD = tl.load(x_ptr_TD + start, mask=in_D[None, :], other=0.0).to(tl.float32)
            gate_ptr_ED = gate_ptr + e_E[:, None] * D + start + d_D[None, :]
            gate_ED = tl.load(gate_ptr_ED, mask=(e_E < E)[:, None] & in_D[None, :], other=0.0)
            logits_TE = tl.dot(x_TD, tl.trans(gate_ED), logits_TE, input_precision="tf32x3")
    return logits_TE


@triton.jit
def _route_kernel(
    x_ptr, gate_ptr, gate_bias_ptr, bias_ptr, valid_ptr, chosen_ptr, experts_ptr, weights_ptr, scores_ptr, block_counts_ptr,
    T, D, D_P, E, stride_x, scale,
    K: tl.constexpr, K_P: tl.constexpr, E_P: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, LIMITED: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, COUNTED_T: tl.constexpr,
):  # fmt: skip
    t_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e_E, k_K = tl.arange(0, E_P), tl.arange(0, K_P)
    in_T, in_E, in_TK = t_T < T, e_E < E, (t_T < T)[:, None] & (k_K < K)[None, :]
    logits_TE = _logits(x_ptr, gate_ptr, t_T, e_E, T, D, D_P, E, stride_x, E_P, EVEN_D, BLOCK_T, BLOCK_D)
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
    PART_T: tl.constexpr = min(BLOCK_T, COUNTED_T)
    counts_SE = tl.sum(tl.reshape(taken_TE.to(tl.int32), [BLOCK_T // PART_T, PART_T, E_P]), axis=1)
    s_S = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T // PART_T) * PART_T) // COUNTED_T
    counts_ptr_SE = block_counts_ptr + s_S[:, None] * E + e_E[None, :]
    in_SE = (s_S * COUNTED_T < T)[:, None] & in_E[None, :]
    if BLOCK_T < COUNTED_T:
        tl.atomic_add(counts_ptr_SE, counts_SE, mask=in_SE)
    else:
        tl.store(counts_ptr_SE, counts_SE, mask=in_SE)


@triton.jit
def _logits_grad_kernel(
    grad_weights_ptr, grad_scores_ptr, scores_ptr, experts_ptr, gate_ptr, grad_logits_ptr, parts_ptr, grad_x_ptr,
    T, D, D_P, E, scale,
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
    grad_x_ptr_TD = grad_x_ptr + t_T[:, None] * D + d_D[None, :]
    if grad_x_ptr.dtype.element_ty == tl.bfloat16:
        # 16 bits of each factor are more than the result keeps.
        high_TE = grad_TE.to(tl.bfloat16)
        middle_TE = (grad_TE - high_TE.to(tl.float32)).to(tl.bfloat16)
        tl.store(parts_ptr + t_T[:, None] * E_P + e_E[None, :], high_TE, mask=in_T[:, None])
        tl.store(parts_ptr + (T + t_T)[:, None] * E_P + e_E[None, :], middle_TE, mask=in_T[:, None])
        gate_ptr_ED = gate_ptr + e_E[:, None] * D_P + d_D[None, :]
        for start in range(0, D, BLOCK_D):
            high_ED, middle_ED = tl.load(gate_ptr_ED + start), tl.load(gate_ptr_ED + E_P * D_P + start)
            grad_TD = tl.dot(middle_TE, high_ED)
            grad_TD = tl.dot(high_TE, middle_ED, grad_TD)
            grad_TD = tl.dot(high_TE, high_ED, grad_TD).to(tl.bfloat16)
            tl.store(grad_x_ptr_TD + start, grad_TD, mask=in_T[:, None] & (start + d_D < D)[None, :])
    else:
        for start in range(0, D, BLOCK_D):
            in_D = start + d_D < D
            gate_ptr_ED = gate_ptr + e_E[:, None] * D + start + d_D[None, :]
            gate_ED = tl.load(gate_ptr_ED, mask=in_E[:, None] & in_D[None, :], other=0.0)
            grad_TD = tl.dot(grad_TE, gate_ED, input_precision="tf32x3")
            tl.store(grad_x_ptr_TD + start, grad_TD.to(grad_x_ptr.dtype.element_ty), mask=in_T[:, None] & in_D[None, :])


@triton.jit
def _gate_grad_kernel(
    grad_ptr, x_ptr, partial_ptr, T, D, E, stride_x, slice_T,
    E_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of the gate over one slice of the tokens; the slices are added afterwards, in order.

    For bf16 tokens the gradient of the logits comes in two bf16 parts [2, T, E_P], else as fp32 [T, E].
    """
    i_T, d_D = tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.program_id(1).to(tl.int64)
    e_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_E, in_D = e_E < E, d_D < D
    end = tl.minimum((part + 1) * slice_T, T)
    total_ED = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for start in range(0, slice_T, BLOCK_T):
        t_T = part * slice_T + start + i_T
        in_T = t_T < end
        x_TD = tl.load(x_ptr + t_T[:, None] * stride_x + d_D[None, :], mask=in_T[:, None] & in_D[None, :], other=0.0)
        if x_TD.dtype == tl.bfloat16:
            high_ptr_ET = grad_ptr + t_T[None, :] * E_P + e_E[:, None]
            middle_ptr_ET = grad_ptr + (T + t_T)[None, :] * E_P + e_E[:, None]
            part_ED = tl.dot(tl.load(middle_ptr_ET, mask=in_T[None, :], other=0.0), x_TD)
            total_ED += tl.dot(tl.load(high_ptr_ET, mask=in_T[None, :], other=0.0), x_TD, part_ED)
        else:
            grad_TE = tl.load(grad_ptr + t_T[:, None] * E + e_E[None, :], mask=in_T[:, None] & in_E[None, :], other=0.0)
            total_ED = tl.dot(tl.trans(grad_TE), x_TD.to(tl.float32), total_ED, input_precision="tf32x3")
    ptr_ED = partial_ptr + (part * E + e_E[:, None]) * D + d_D[None, :]
    tl.store(ptr_ED, total_ED, mask=in_E[:, None] & in_D[None, :])
