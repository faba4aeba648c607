"""What each low-precision recipe does to the operands of a matrix product, in plain PyTorch and bit for bit.

A quantised operand is a tensor of small floating-point elements and one scale for each block of them; a block lies along the axis
that the product sums over. The recipes are those of Megatron-Core and torchao: ``tensorwise`` (E4M3, gradients E5M2), ``rowwise``
(power-of-two scales), ``blockwise`` (arXiv 2412.19437), ``mxfp8`` (OCP Microscaling, scales rounded up so that nothing saturates)
and ``nvfp4`` (arXiv 2509.25149: two levels of scales, square weight blocks, stochastically rounded gradients, and operands of the
weight gradient rotated by a Hadamard matrix). Rows of ``rowwise`` are quantised once for all products.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_MIN_AMAX = 1e-12  # As in torchao: the scale of a block of zeros stays finite.
HADAMARD_SIZE = 16


class Quantized(NamedTuple):
    """``elements`` [M, K] in their format (E2M1, which torch lacks, in fp32), ``scale`` [blocks of M, blocks of K] fp32: an
    operand is its elements times its scales."""

    elements: Tensor
    scale: Tensor


class Groups(NamedTuple):
    """Rows of operands one below the other: ``index_M`` [M] int64 is the operand of each, out of ``count``."""

    index_M: Tensor
    count: int


@dataclass(frozen=True)
class Quantizer:
    """How one kind of operand is quantised.

    ``block``: elements that share a scale, (across, along) the summed axis; None: all there are. ``scale``: "fp32"; "power of
    two", rounded so that elements shrink; "e8m0", a power of two in eight bits, rounded so that none saturates; "e4m3", relative
    to an fp32 scale of the whole tensor.
    """

    element: Literal["e4m3", "e5m2", "e2m1"]
    block: tuple[int | None, int | None]
    scale: Literal["fp32", "power of two", "e8m0", "e4m3"]
    stochastic: bool = False

    def quantize(self, x_MK: Tensor, axis: int, groups: Groups | None = None) -> Quantized:
        """Quantises a matrix (any floating dtype, not empty) for a product that sums over dimension ``axis``.

        Blocks at the edges may be partial. A block without a finite maximum becomes NaN. With ``groups`` the matrix is several
        operands, in each of which whole blocks lie, and there is a scale for each row where all rows of an operand share one.
        """
        size_m, size_k = self._block_sizes(x_MK, axis, groups)
        blocks = _blocks(x_MK, (size_m, size_k))
        # Not abs().amax(), which would write all of it once more.
        amax = torch.linalg.vector_norm(blocks, torch.inf, (1, 3), keepdim=True).float()
        blocks_of = groups and Groups(groups.index_M[::size_m], groups.count)
        if self.rows_of_block(axis) is None:
            amax = _largest(amax, blocks_of)
        factor, scale = self._scales(amax, blocks_of)
        elements = self._round(blocks * factor)
        (m, size_m, k, size_k), (M, K) = blocks.shape, x_MK.shape
        return Quantized(elements.reshape(m * size_m, k * size_k)[:M, :K], scale.view(m, k))

    def simulate(self, x_MK: Tensor, axis: int, groups: Groups | None = None) -> Tensor:
        """The matrix as the product sees it: quantised and multiplied out again, in fp32 (fp64 for fp64)."""
        elements, scale = self.quantize(x_MK, axis, groups)
        wide = torch.promote_types(x_MK.dtype, torch.float32)
        sizes = self._block_sizes(x_MK, axis, groups)
        blocks = _blocks(elements.to(wide), sizes) * scale[:, None, :, None]
        return blocks.flatten(2).flatten(0, 1)[: x_MK.shape[0], : x_MK.shape[1]]

    def rows_of_block(self, axis: int) -> int | None:
        """None where a block has all rows."""
        across, along = self.block
        return across if axis == 1 else along

    def _block_sizes(self, x_MK: Tensor, axis: int, groups: Groups | None) -> tuple[int, int]:
        size_m, size_k = self.block if axis == 1 else self.block[::-1]
        return size_m or (len(x_MK) if groups is None else 1), size_k or x_MK.shape[1]

    def _scales(self, amax: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor]:
        """What elements are multiplied by before they are rounded, and what they stand for a multiple of: inverses, rounded."""
        largest = _MAX[self.element]
        if self.scale == "e8m0":
            scale = _ceil_power_of_two((amax / largest).clamp(min=2.0**-127)).clamp(max=2.0**127)
            return 1 / scale, scale
        if self.scale == "e4m3":
            return self._two_level_scales(amax, _largest(amax.amax(2, keepdim=True), groups))
        factor = (largest / amax.double().clamp(min=_MIN_AMAX)).float()
        if self.scale == "power of two":
            factor = _floor_power_of_two(factor)
        return factor, 1 / factor

    def _two_level_scales(self, amax: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        tensor_scale = largest / (_MAX["e4m3"] * _MAX[self.element])
        tensor_scale = torch.where(tensor_scale == 0, 1, tensor_scale)
        smallest = torch.finfo(torch.float8_e4m3fn).tiny
        scale = (amax / _MAX[self.element] / tensor_scale).clamp(smallest, _MAX["e4m3"]).to(torch.float8_e4m3fn).float()
        return 1 / tensor_scale / scale, scale * tensor_scale

    def _round(self, values: Tensor) -> Tensor:
        largest = _MAX[self.element]
        values = values.clamp(-largest, largest)
        if self.element == "e2m1":
            return _round_to_e2m1(values, _noise(values) if self.stochastic else None)
        return values.to(_FLOAT8[self.element])


@dataclass(frozen=True)
class Recipe:
    """``tile`` divides both sizes of a weight that kernels can multiply.

    ``hadamard``: rotate the weight gradient's operands. ``turns_rows``: weight gradients are of :func:`turned_rows`.
    """

    input: Quantizer
    weight: Quantizer
    grad: Quantizer
    tile: int
    hadamard: bool = False
    turns_rows: bool = False


_TENSORWISE = Quantizer("e4m3", (None, None), "fp32")
_ROWWISE = Quantizer("e4m3", (1, None), "power of two")
_MXFP8 = Quantizer("e4m3", (1, 32), "e8m0")
_BLOCKWISE = Quantizer("e4m3", (1, 128), "fp32")
_NVFP4 = Quantizer("e2m1", (1, 16), "e4m3")

RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe(_TENSORWISE, _TENSORWISE, Quantizer("e5m2", (None, None), "fp32"), tile=16),
    "rowwise": Recipe(_ROWWISE, _ROWWISE, _ROWWISE, tile=16, turns_rows=True),
    "blockwise": Recipe(_BLOCKWISE, Quantizer("e4m3", (128, 128), "fp32"), _BLOCKWISE, tile=128),
    "mxfp8": Recipe(_MXFP8, _MXFP8, _MXFP8, tile=32),
    "nvfp4": Recipe(
        _NVFP4,
        Quantizer("e2m1", (16, 16), "e4m3"),
        Quantizer("e2m1", (1, 16), "e4m3", stochastic=True),
        tile=16,
        hadamard=True,
    ),
}


TURNED_ROWS = 128


def turned_rows(quantizer: Quantizer, x_RK: Tensor) -> Tensor:
    """Rows quantised for a product over dimension 1 as a product over the rows sees them, in fp32 (fp64 for fp64).

    The elements of each 128 rows, and of the rest, become those of the largest of their scales; all of these are powers of two,
    so that only what is less than the format's smallest number is rounded once more.
    """
    elements_RK, scale_R1 = quantizer.quantize(x_RK, 1)
    wide = torch.promote_types(x_RK.dtype, torch.float32)
    blocks = torch.nn.functional.pad(scale_R1, (0, 0, 0, -len(x_RK) % TURNED_ROWS)).unflatten(0, (-1, TURNED_ROWS))
    largest_R1 = blocks.amax(1).repeat_interleave(TURNED_ROWS, 0)[: len(x_RK)]
    return (elements_RK.to(wide) * (scale_R1 / largest_R1)).to(elements_RK.dtype).to(wide) * largest_R1


def rotate_rows(x_RK: Tensor) -> Tensor:
    """Every 16 rows times one orthogonal matrix, in fp32 (fp64 for fp64); missing rows of the last 16 are added as zeros.

    The product of two matrices over their rows is that of the rotated ones; rotation spreads outliers. The matrix is a Hadamard
    matrix whose columns have random but fixed signs.
    """
    wide = x_RK.to(torch.promote_types(x_RK.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, 0, 0, -len(wide) % HADAMARD_SIZE))
    matrix = torch.tensor(_HADAMARD, dtype=wide.dtype, device=wide.device)
    return (matrix @ padded.view(-1, HADAMARD_SIZE, wide.shape[1])).flatten(0, 1)


_SIGNS = [1, -1, -1, 1, -1, 1, 1, 1, -1, 1, -1, -1, -1, 1, 1, -1]
_HADAMARD = [[(-1) ** (i & j).bit_count() * sign / 4 for j, sign in enumerate(_SIGNS)] for i in range(HADAMARD_SIZE)]


def _blocks(x_MK: Tensor, sizes: tuple[int, int]) -> Tensor:
    """[blocks of M, size, blocks of K, size] with zeros where a block reaches past the edge, in fp32 (fp64 for fp64)."""
    (M, K), (size_m, size_k) = x_MK.shape, sizes
    padded = torch.nn.functional.pad(x_MK, (0, -K % size_k, 0, -M % size_m))
    blocks = padded.view((M + size_m - 1) // size_m, size_m, (K + size_k - 1) // size_k, size_k)
    return blocks.to(torch.promote_types(x_MK.dtype, torch.float32))


def _largest(amax: Tensor, groups: Groups | None) -> Tensor:
    """The largest over all rows of blocks [m, 1, k, 1], or for each row over those of its group."""
    if groups is None:
        return amax.amax(0, keepdim=True)
    index = groups.index_M[:, None, None, None].expand_as(amax)
    return amax.new_zeros(groups.count, *amax.shape[1:]).scatter_reduce(0, index, amax, "amax")[groups.index_M]


def _floor_power_of_two(x: Tensor) -> Tensor:
    return x / (2 * torch.frexp(x).mantissa)


def _ceil_power_of_two(x: Tensor) -> Tensor:
    mantissa = torch.frexp(x).mantissa
    return torch.where(mantissa == 0.5, x, x / mantissa)


def _round_to_e2m1(values: Tensor, noise: Tensor | None) -> Tensor:
    """To 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and their negatives: the nearest, an even mantissa in a tie; with noise uniform in [0, 1)
    one of the two neighbours, right in the mean."""
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(values.dtype)
    steps = size / step
    rounded = steps.round() if noise is None else (steps + noise).floor()
    return torch.copysign(rounded * step, values)


def _noise(values: Tensor) -> Tensor:
    """A hash of each value and its place as a number uniform in [0, 1): no random state has to be saved to repeat a step."""
    place = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view_as(values)
    # int32 has the bits of unsigned numbers modulo 2^32 but for shifts, which must not copy the sign.
    bits = values.float().view(torch.int32) * _signed(0x9E3779B1) + place * _signed(0x85EBCA77)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ bits >> 15 & 0x1FFFF) * _signed(multiplier)
    return ((bits ^ bits >> 16 & 0xFFFF) >> 8 & 0xFFFFFF).to(values.dtype) / 2**24


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
