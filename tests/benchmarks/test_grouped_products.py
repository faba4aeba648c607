"""What benchmarks/grouped_products.py measures computes the same product every time; its tables."""

import pytest
import torch

from benchmarks import grouped_products
from benchmarks.moe_layer import Shape

SHAPE = Shape(D=256, F=128, E=5, K=2, T=40)


@pytest.mark.parametrize("weight", ["w13", "w2"])
def test_all_formats_compute_the_same(weight):
    torch.manual_seed(0)
    groups_E = grouped_products.sizes_of_groups(SHAPE, 1, "cpu")
    assert groups_E.sum() == SHAPE.R and not (grouped_products.sizes_of_groups(SHAPE, 16, "cpu") % 16).any()
    tensors = grouped_products.operands(*grouped_products.weights(SHAPE)[weight], groups_E)
    results = {name: run() for name, run in (grouped_products.given(*tensors) | grouped_products.from_bf16(*tensors)).items()}
    for name, result in results.items():
        product = name.split("/")[0]
        if product == "backward":
            assert result is None
            continue
        expected = results[f"{'output' if product == 'forward' else product}/bf16"].float()
        assert (result.float() - expected).norm() < 0.05 * expected.norm(), name


def test_tables():
    runs = [f"{product}/{kind}" for product in ("output", "input grad", "weight grad") for kind in ("bf16", "rowwise", "torch")]
    ms = dict.fromkeys(runs, 1.0) | dict.fromkeys(
        [f"{direction}/{kind}" for direction in ("forward", "backward") for kind in ("bf16", "rowwise", "blockwise")], 0.5
    )
    missing = {f"{name}/blockwise": None for name in ("output", "input grad", "weight grad")}
    printed = grouped_products.tables({"qwen3/w2": ms | missing | {"forward/torchao": 0.75, "backward/torchao": None}})
    assert [line.split() for line in printed.splitlines()[2:3]] == [["qwen3/w2", "output", "206", "206", "-", "206"]]
    assert ["qwen3/w2", "forward", "0.500", "0.500", "0.500", "0.750"] in [line.split() for line in printed.splitlines()]
