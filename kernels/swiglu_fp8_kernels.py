"""The kernels of :mod:`kernels.swiglu_fp8`."""

import triton
import triton.language as tl

from kernels.quantize_kernels import bits_of, factor_of, places, row_bits, store_scales
from kernels.swiglu import place_of_row


@triton.jit(do_not_specialize=["R"])
def _blockwise_forward_kernel(
    gate_up_ptr, weight_ptr, pair_ptr, num_rows_ptr, act_ptr, scale_ptr, F, R, BLOCKS: tl.constexpr
):  # fmt: skip
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        weight = tl.load(weight_ptr + tl.load(pair_ptr + row))
        f_BC = places(BLOCKS)
        dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
        gate_BC = tl.load(gate_up_ptr + row * 2 * F + f_BC, mask=f_BC < F, other=0.0).to(tl.float32)
        up_BC = tl.load(gate_up_ptr + row * 2 * F + F + f_BC, mask=f_BC < F, other=0.0).to(tl.float32)
        act_BC = (gate_BC * tl.sigmoid(gate_BC) * up_BC * weight).to(dtype).to(tl.float32)
        factor_B = factor_of(row_bits(act_BC, True), False)
        tl.store(act_ptr + row * F + f_BC, (act_BC * factor_B[:, None]).to(tl.float8e4nv), mask=f_BC < F)
        store_scales(factor_B, scale_ptr + row, R, F // 128, True, True)


@triton.jit(do_not_specialize=["R"])
def _rowwise_forward_kernel(
    gate_up_ptr, weight_ptr, pair_ptr, num_rows_ptr, act_ptr, scale_ptr, F, R, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A row in chunks, of which there need not be a power of two."""
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        weight = tl.load(weight_ptr + tl.load(pair_ptr + row))
        dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
        bits_C, acts = tl.zeros([CHUNK], tl.int32), ()
        for i in tl.static_range(CHUNKS):
            f_C = i * CHUNK + tl.arange(0, CHUNK)
            gate_C = tl.load(gate_up_ptr + row * 2 * F + f_C, mask=f_C < F, other=0.0).to(tl.float32)
            up_C = tl.load(gate_up_ptr + row * 2 * F + F + f_C, mask=f_C < F, other=0.0).to(tl.float32)
            act_C = (gate_C * tl.sigmoid(gate_C) * up_C * weight).to(dtype).to(tl.float32)
            bits_C, acts = tl.maximum(bits_C, bits_of(act_C)), acts + (act_C,)
        factor = factor_of(tl.max(bits_C, 0), True)
        for i in tl.static_range(CHUNKS):
            f_C = i * CHUNK + tl.arange(0, CHUNK)
            tl.store(act_ptr + row * F + f_C, (acts[i] * factor).to(tl.float8e4nv), mask=f_C < F)
        tl.store(scale_ptr + row, tl.div_rn(1.0, factor))


@triton.jit
def _gradients(gate, up, weight, grad, dtype: tl.constexpr):
    """What the gradient of the routing weight is the sum of; activation, and gradients of gate and up, rounded to ``dtype``."""
    sig = tl.sigmoid(gate)
    silu = gate * sig
    grad_gate = grad * weight * up * (sig + silu * (1 - sig))
    return grad * silu * up, (silu * up * weight).to(dtype), grad_gate.to(dtype), (grad * weight * silu).to(dtype)


@triton.jit
def _load_scales(scale_ptr, half, F, BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr):
    """Of the blocks in half a row, or the whole row's one."""
    if BLOCKWISE:
        b_B = tl.arange(0, BLOCKS)
        return tl.load(scale_ptr + half * (F // 128) + b_B, mask=b_B * 128 < F, other=0.0)[:, None]
    else:
        return tl.load(scale_ptr)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    grad_ptr, gate_up_ptr, kept_scale_ptr, weight_ptr, pair_ptr, num_rows_ptr, first_ptr,
    grad_gate_up_ptr, elements_ptr, scale_ptr, grad_weight_ptr, act_ptr, F, R, size, stride,
    BLOCKS: tl.constexpr, BLOCKWISE: tl.constexpr,
):  # fmt: skip
    """The pre-activations are numbers, or E4M3 elements and their scales in rows of ``stride`` bytes."""
    for row in tl.range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0), num_stages=3):
        row = tl.cast(row, tl.int64)
        pair = tl.load(pair_ptr + row)
        weight = tl.load(weight_ptr + pair)
        f_BC = places(BLOCKS)
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        mask_BC, gate_at, up_at = f_BC < F, row * 2 * F + f_BC, row * 2 * F + F + f_BC
        place = place_of_row(row, first_ptr, size)
        gate_BC = tl.load(gate_up_ptr + place * stride + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        up_BC = tl.load(gate_up_ptr + place * stride + F + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        if kept_scale_ptr is not None:
            kept_scales_ptr = kept_scale_ptr + place * (stride // 4)
            gate_BC = (gate_BC * _load_scales(kept_scales_ptr, 0, F, BLOCKS, BLOCKWISE)).to(dtype).to(tl.float32)
            up_BC = (up_BC * _load_scales(kept_scales_ptr, 1, F, BLOCKS, BLOCKWISE)).to(dtype).to(tl.float32)
        grad_BC = tl.load(grad_ptr + row * F + f_BC, mask=mask_BC, other=0.0).to(tl.float32)
        product_BC, act_BC, grad_gate_BC, grad_up_BC = _gradients(gate_BC, up_BC, weight, grad_BC, dtype)
        tl.store(grad_weight_ptr + pair, tl.sum(product_BC))
        tl.store(act_ptr + row * F + f_BC, act_BC, mask=mask_BC)
        tl.store(grad_gate_up_ptr + gate_at, grad_gate_BC, mask=mask_BC)
        tl.store(grad_gate_up_ptr + up_at, grad_up_BC, mask=mask_BC)
        # Both gradients are one operand.
        bits_gate_B = row_bits(grad_gate_BC.to(tl.float32), BLOCKWISE)
        bits_up_B = row_bits(grad_up_BC.to(tl.float32), BLOCKWISE)
        if not BLOCKWISE:
            bits_gate_B = tl.maximum(bits_gate_B, bits_up_B)
            bits_up_B = bits_gate_B
        factor_gate_B, factor_up_B = factor_of(bits_gate_B, not BLOCKWISE), factor_of(bits_up_B, not BLOCKWISE)
        tl.store(elements_ptr + gate_at, (grad_gate_BC.to(tl.float32) * factor_gate_B[:, None]).to(tl.float8e4nv), mask=mask_BC)
        tl.store(elements_ptr + up_at, (grad_up_BC.to(tl.float32) * factor_up_B[:, None]).to(tl.float8e4nv), mask=mask_BC)
        store_scales(factor_gate_B, scale_ptr + row, R, F // 128, True, BLOCKWISE)
        if BLOCKWISE:
            store_scales(factor_up_B, scale_ptr + F // 128 * R + row, R, F // 128, True, BLOCKWISE)


@triton.jit
def _sum_and_largest(sum_a, first_a, second_a, sum_b, first_b, second_b):
    return sum_a + sum_b, tl.maximum(first_a, first_b), tl.maximum(second_a, second_b)


@triton.jit(do_not_specialize=["R"])
def _rowwise_backward_kernel(
    grad_ptr, gate_up_ptr, kept_scale_ptr, weight_ptr, pair_ptr, num_rows_ptr, first_ptr,
    elements_ptr, scale_ptr, grad_weight_ptr, act_ptr, act_scale_ptr, F, R, size, stride,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As :func:`_backward_kernel` with a scale a row, in chunks; gradients and activation come out quantised alone."""
    for row in range(tl.program_id(0), tl.minimum(tl.load(num_rows_ptr), R), tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        pair = tl.load(pair_ptr + row)
        weight = tl.load(weight_ptr + pair)
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        place = place_of_row(row, first_ptr, size)
        sum_C, acts, grads = tl.zeros([CHUNK], tl.float32), (), ()
        grad_bits_C, act_bits_C = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        for i in tl.static_range(CHUNKS):
            f_C = i * CHUNK + tl.arange(0, CHUNK)
            gate_C = tl.load(gate_up_ptr + place * stride + f_C, mask=f_C < F, other=0.0).to(tl.float32)
            up_C = tl.load(gate_up_ptr + place * stride + F + f_C, mask=f_C < F, other=0.0).to(tl.float32)
            if kept_scale_ptr is not None:
                kept_scale = tl.load(kept_scale_ptr + place * (stride // 4))  # by which bf16 need not be rounded
                gate_C, up_C = gate_C * kept_scale, up_C * kept_scale
            grad_C = tl.load(grad_ptr + row * F + f_C, mask=f_C < F, other=0.0).to(tl.float32)
            product_C, act_C, grad_gate_C, grad_up_C = _gradients(gate_C, up_C, weight, grad_C, dtype)
            sum_C += product_C
            act_C, grad_gate_C, grad_up_C = act_C.to(tl.float32), grad_gate_C.to(tl.float32), grad_up_C.to(tl.float32)
            grad_bits_C = tl.maximum(grad_bits_C, tl.maximum(bits_of(grad_gate_C), bits_of(grad_up_C)))
            act_bits_C = tl.maximum(act_bits_C, bits_of(act_C))
            acts, grads = acts + (act_C,), grads + (grad_gate_C, grad_up_C)
        grad_weight, grad_bits, act_bits = tl.reduce((sum_C, grad_bits_C, act_bits_C), 0, _sum_and_largest)
        factor, act_factor = factor_of(grad_bits, True), factor_of(act_bits, True)
        for i in tl.static_range(CHUNKS):
            f_C = i * CHUNK + tl.arange(0, CHUNK)
            at_C = row * 2 * F + f_C
            tl.store(elements_ptr + at_C, (grads[2 * i] * factor).to(tl.float8e4nv), mask=f_C < F)
            tl.store(elements_ptr + at_C + F, (grads[2 * i + 1] * factor).to(tl.float8e4nv), mask=f_C < F)
            tl.store(act_ptr + row * F + f_C, (acts[i] * act_factor).to(tl.float8e4nv), mask=f_C < F)
        tl.store(scale_ptr + row, tl.div_rn(1.0, factor))
        tl.store(act_scale_ptr + row, tl.div_rn(1.0, act_factor))
        tl.store(grad_weight_ptr + pair, grad_weight)
