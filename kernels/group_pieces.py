"""How kernels in Gluon that turn groups of rows share them: in blocks of rows, of which a program takes a piece at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(128)  # of a block
PIECE = gl.constexpr(2)  # blocks
WARPS = gl.constexpr(4)


@gluon.constexpr_function
def in_a_warp(length):
    """So that no warp needs another for what is made of all elements."""
    return gl.BlockedLayout([max(length // 32, 1)], [32], [4], [0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def groups(offsets_ptr, E, E_P: gl.constexpr):
    """Of each group its first row, its end, its blocks, and its pieces."""
    e_E = gl.arange(0, E_P, in_a_warp(E_P))
    begin_E = gl.load(offsets_ptr + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    end_E = gl.load(offsets_ptr + e_E, mask=e_E < E, other=0)
    blocks_E = gl.where(e_E < E, gl.maximum(gl.cdiv(end_E - begin_E, ROWS), 1), 0)
    return begin_E, end_E, blocks_E, gl.cdiv(blocks_E, PIECE)


@gluon.jit
def _sum_where(mask, x):
    return gl.sum(gl.where(mask, x, 0), 0)


@gluon.jit
def place_of(offsets_ptr, piece, E, E_P: gl.constexpr):
    """Of a piece its group, the group's first row, end and pieces, its own first block and the one behind it, and how many blocks
    the groups ahead have."""
    begin_E, end_E, blocks_E, pieces_E = groups(offsets_ptr, E, E_P)
    e_E, upto_E = gl.arange(0, E_P, in_a_warp(E_P)), gl.associative_scan(pieces_E, 0, _add)
    e = gl.sum((upto_E <= piece).to(gl.int32), 0)
    pieces = _sum_where(e_E == e, pieces_E)
    block = (piece - _sum_where(e_E == e, upto_E) + pieces) * PIECE
    behind = gl.minimum(block + PIECE, _sum_where(e_E == e, blocks_E))
    begin, end = _sum_where(e_E == e, begin_E), _sum_where(e_E == e, end_E)
    return e, begin, end, pieces, block, behind, _sum_where(e_E < e, blocks_E)


@gluon.jit
def store_end(ends_ptr, e, begin, end, ahead):
    """Where a group ends among turned ones."""
    gl.store(ends_ptr + e, (ahead + gl.maximum(gl.cdiv(end - begin, ROWS), 1)) * ROWS)
