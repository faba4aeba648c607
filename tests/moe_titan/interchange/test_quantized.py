"""Dequantisation against a plain loop."""

import pytest
import torch

from moe_titan.interchange.quantized import dequantize


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(256, 128, (128, 128)), (130, 300, (128, 128)), (7, 5, (3, 2)), (1, 1, (4, 4))]
)
def test_dequantize(rows, columns, block) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.1
    expected = torch.empty(rows, columns)
    values = weight.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            expected[place] = values[place] * scale[i, j]
    assert torch.equal(dequantize(weight, scale, block), expected)
