"""Quantisation written from the formats' definitions: fp64 numpy, a table of representable numbers and a loop over the blocks."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# recipe -> operand -> element format, block (across, along the summed axis; 0: all), scale
FORMATS = {
    "tensorwise": {"input": ("e4m3", (0, 0), "fp32"), "weight": ("e4m3", (0, 0), "fp32"), "grad": ("e5m2", (0, 0), "fp32")},
    "rowwise": dict.fromkeys(("input", "weight", "grad"), ("e4m3", (1, 0), "power of two")),
    "blockwise": {
        "input": ("e4m3", (1, 128), "fp32"),
        "weight": ("e4m3", (128, 128), "fp32"),
        "grad": ("e4m3", (1, 128), "fp32"),
    },
    "mxfp8": dict.fromkeys(("input", "weight", "grad"), ("e4m3", (1, 32), "e8m0")),
    "nvfp4": {"input": ("e2m1", (1, 16), "e4m3"), "weight": ("e2m1", (16, 16), "e4m3"), "grad": ("e2m1", (1, 16), "e4m3")},
}


@cache
def representable(element: str) -> np.ndarray:
    """The finite numbers >= 0 of a format in ascending order, which is that of their codes."""
    if element == "e2m1":
        return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.arange(128, dtype=torch.uint8).view(FLOAT8[element]).double().numpy()
    return values[np.isfinite(values)]


def nearest(values: np.ndarray, element: str) -> np.ndarray:
    """Rounds to the nearest representable number, to the even code in a tie, and to the largest beyond it."""
    table, size = representable(element), np.abs(values)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    take_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.copysign(np.where(take_high, high, low), values)


def simulate(x: Tensor, axis: int, recipe: str, operand: str) -> Tensor:
    """The operand as a low-precision product over ``axis`` sees it, fp64."""
    element, (across, along), kind = FORMATS[recipe][operand]
    array = x.double().numpy()
    out = np.empty_like(array)
    largest = representable(element)[-1]
    rows, columns = (across, along) if axis == 1 else (along, across)
    rows, columns = rows or array.shape[0], columns or array.shape[1]
    whole = np.float32(np.abs(array).max()) / np.float32(448 * 6) or np.float32(1)
    for i in range(0, array.shape[0], rows):
        for j in range(0, array.shape[1], columns):
            block = array[i : i + rows, j : j + columns]
            amax = np.float32(np.abs(block).max())
            factor, scale = _scale(amax, kind, np.float32(largest), whole)
            scaled = block * factor
            if x.dtype != torch.float64:
                scaled = np.float32(block) * factor
            out[i : i + rows, j : j + columns] = nearest(np.float64(scaled), element) * scale
    return torch.from_numpy(out)


def simulate_turned(x: Tensor, recipe: str, operand: str) -> Tensor:
    """Rows with a scale each as a product over the rows sees them, the elements of each 128 in the largest of their scales."""
    element, block, kind = FORMATS[recipe][operand]
    assert block == (1, 0)
    array, rows = x.double().numpy(), simulate(x, 1, recipe, operand).numpy()
    out, largest = np.empty_like(array), np.float32(representable(element)[-1])
    for i in range(0, len(array), 128):
        amax = np.float32(np.abs(array[i : i + 128]).max(1))
        scale = max(_scale(each, kind, largest, np.float32(1))[1] for each in amax)
        out[i : i + 128] = nearest(rows[i : i + 128] / scale, element) * scale
    return torch.from_numpy(out)


def _scale(amax: np.float32, kind: str, largest: np.float32, whole: np.float32) -> tuple[np.float32, np.float64]:
    if kind == "e8m0":
        exponent = -127
        while np.float64(amax / largest) > 2.0**exponent:
            exponent += 1
        return np.float32(2.0**-exponent), np.float64(2.0**exponent)
    if kind == "e4m3":
        scale = np.float32(nearest(np.clip(np.float64(amax / np.float32(6) / whole), 2.0**-6, 448), "e4m3"))
        return np.float32(1) / whole / scale, np.float64(scale * whole)
    factor = np.float32(np.float64(largest) / max(np.float64(amax), 1e-12))
    if kind == "power of two":
        factor = np.float32(2.0 ** (np.frexp(factor)[1] - 1))
    return factor, np.float64(np.float32(1) / factor)
