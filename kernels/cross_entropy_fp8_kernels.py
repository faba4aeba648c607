"""The kernel behind :func:`kernels.cross_entropy_fp8.cross_entropy_backward_fp8`, in Gluon.

It turns a block as those of :mod:`kernels.quantize_columns_kernels` do, whose layouts these are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.quantize_columns_kernels import COLUMNS, READ, ROWS, WRITTEN

WARPS = gl.constexpr(4)


@gluon.jit
def _gradients_kernel(
    logits_ptr, labels_ptr, lse_ptr, grad_ptr, factor_ptr, turned_factor_ptr, out_ptr, turned_ptr,
    T, V, W, stride_t: gl.constexpr, first,
):  # fmt: skip
    """A program computes 128 tokens of 64 words."""
    first_t, first_v = gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS
    row_T = gl.arange(0, ROWS, gl.SliceLayout(1, READ))
    t_T, v_V = first_t + row_T, first_v + gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    here_T = t_T < T
    mask_TV = here_T[:, None] & (v_V < V)[None, :]
    logits_ptr += gl.to_tensor(first_t).to(gl.int64) * stride_t
    logit_TV = gl.load(logits_ptr + row_T[:, None] * stride_t + v_V[None, :], mask=mask_TV, other=-float("inf"))
    prob_TV = gl.exp(logit_TV.to(gl.float32) - gl.load(lse_ptr + t_T, mask=here_T, other=0.0)[:, None])
    column_T = (gl.load(labels_ptr + t_T, mask=here_T, other=-1) - first).to(gl.int32)
    grad_TV = gl.where(v_V[None, :] == column_T[:, None], prob_TV - 1.0, prob_TV)
    grad_TV *= gl.load(grad_ptr + t_T, mask=here_T, other=0.0)[:, None]
    grad_TV = grad_TV.to(logit_TV.dtype).to(gl.float32)

    element_TV = grad_TV * gl.load(factor_ptr + t_T, mask=here_T, other=0.0)[:, None]
    element_TV = gl.minimum(gl.maximum(element_TV, -448.0), 448.0).to(gl.float8e4nv)
    out_ptr += gl.to_tensor(first_t).to(gl.int64) * V
    gl.store(out_ptr + row_T[:, None] * V + v_V[None, :], element_TV, mask=mask_TV)

    turned_VT = gl.convert_layout(gl.permute(grad_TV * gl.load(turned_factor_ptr), (1, 0)), WRITTEN)
    column_V, to_T = gl.arange(0, COLUMNS, gl.SliceLayout(1, WRITTEN)), gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
    turned_ptr += gl.to_tensor(first_v).to(gl.int64) * W + first_t
    to_VT = turned_ptr + column_V[:, None] * W + to_T[None, :]
    gl.store(to_VT, turned_VT.to(gl.float8e5), mask=(first_v + column_V < V)[:, None])
