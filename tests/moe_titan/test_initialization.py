"""Initial weights are a function of seed and name, with the distributions of ``torch.nn.init``."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from layout_runs import full, full_parameters
from torch import nn

from moe_titan.engine import TrainOptions
from moe_titan.initialization import initialize, record_initialization
from moe_titan.models import build_model
from parallelisms.folded_mesh import Layout

LAYOUTS = [
    Layout(dp_shard=4),  # 6 experts over 4 ranks
    Layout(tp=4),
    Layout(dp_shard=2, tp=2, ep=2),  # 3 experts over 2 ranks
    Layout(dp_replicate=2, tp=2, etp=4),
    Layout(dp_shard=4, ep=2, etp=2),
    Layout(dp_shard=8),  # experts cut within
]


def _initial(layout: Layout, seed: int = 0, n_layers: int = 2) -> dict[str, np.ndarray]:
    name, args = tiny.deepseek()
    args.n_layers = n_layers
    return full_parameters(tiny.build((name, args), layout, TrainOptions(seed=seed)))


@pytest.fixture(scope="module")
def alone(pool) -> dict[str, np.ndarray]:
    return pool.run(1, _initial, Layout())[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layout_changes_no_bit(pool, alone, layout) -> None:
    for rank in pool.run(layout.world, _initial, layout):
        assert rank.keys() == alone.keys()
        for name, value in alone.items():
            assert np.array_equal(rank[name], value), name


def test_other_parameters_change_no_bit(pool, alone) -> None:
    deeper = pool.run(1, _initial, Layout(), 0, 3)[0]
    assert len(deeper) > len(alone)
    assert all(np.array_equal(deeper[name], value) for name, value in alone.items())


def test_the_seed_changes_every_random_parameter(pool, alone) -> None:
    other = pool.run(1, _initial, Layout(), 1)[0]
    for name, value in alone.items():
        constant = "norm" in name
        assert (value == 1).all() == constant
        assert (other[name] == value).mean() < 1e-3 or constant, name


def test_experts_layers_and_projections_differ(alone) -> None:
    matrices = [matrix for name in ("w1", "w2", "w3") for matrix in alone[f"layers.1.moe.experts.{name}"]]
    matrices += [alone[f"layers.{layer}.attention.wo.weight"] for layer in (0, 1)]
    values = np.concatenate([matrix.ravel() for matrix in matrices])
    # Distinct up to the chance meetings of some 8000 fp32 numbers.
    assert len(np.unique(values)) > 0.99 * len(values)


def test_names_and_shapes_are_torchtitans(alone) -> None:
    assert alone["layers.1.moe.experts.w1"].shape == alone["layers.1.moe.experts.w3"].shape == (6, 16, 24)
    assert alone["layers.1.moe.experts.w2"].shape == (6, 24, 16)


FILLS = {
    "normal": lambda t: nn.init.normal_(t, mean=0.5, std=2.0),
    "narrow": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "cut": lambda t: nn.init.trunc_normal_(t, mean=0.1, std=1.0, a=-0.5, b=2.0),
    "uniform": lambda t: nn.init.uniform_(t, -3.0, 1.0),
    "constant": lambda t: nn.init.constant_(t, 0.25),
    "ones": lambda t: nn.init.ones_(t),
    "zeros": lambda t: nn.init.zeros_(t),
}
SIZE = (500, 400)


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        for name in FILLS:
            self.register_parameter(name, nn.Parameter(torch.empty(SIZE)))
        self.register_buffer("table", torch.empty(3))

    def init_weights(self, buffer_device: torch.device) -> None:
        for name, fill in FILLS.items():
            fill(self.get_parameter(name))
        self.table = torch.arange(3.0, device=buffer_device)


@pytest.fixture(scope="module")
def filled() -> Filled:
    with torch.device("meta"):
        model = Filled()
    initialize(model, record_initialization(model, torch.device("cpu")), 7, torch.device("cpu"))
    return model


@pytest.mark.parametrize("name", FILLS)
def test_distribution_is_that_of_torch(filled, name) -> None:
    torch.manual_seed(0)
    expected = FILLS[name](torch.empty(SIZE)).flatten().double()
    actual = filled.get_parameter(name).detach().flatten().double()
    if name in ("constant", "ones", "zeros"):
        assert torch.equal(actual, expected)
        return
    # Standard errors of 200 000 samples, five of each of the two.
    spread, count = expected.std(), len(expected)
    assert (actual.mean() - expected.mean()).abs() < 10 * spread / count**0.5
    assert actual.std().item() == pytest.approx(spread.item(), rel=10 / count**0.5)
    at = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    reached = (actual[:, None] <= expected.quantile(at)).double().mean(0)
    assert (reached - at).abs().max() < 10 * 0.5 / count**0.5
    assert actual.min() >= expected.min() - 0.5 * spread and actual.max() <= expected.max() + 0.5 * spread


def test_truncation(filled) -> None:
    assert -0.5 <= filled.cut.min() < -0.49 and 1.99 < filled.cut.max() <= 2.0


@pytest.mark.parametrize("shift", [1, 2, 7, 400, 401])
def test_neighbours_are_independent(filled, shift) -> None:
    values = filled.normal.detach().flatten()
    values = (values - values.mean()) / values.std()
    correlation = (values[shift:] * values[:-shift]).mean()
    assert correlation.abs() < 5 / len(values) ** 0.5


def test_parameters_are_independent(filled) -> None:
    pairs = torch.stack([filled.normal.detach().flatten(), filled.uniform.detach().flatten(), filled.cut.detach().flatten()])
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 5 / pairs.shape[1] ** 0.5


def test_buffers_keep_their_values(filled) -> None:
    assert filled.table.tolist() == [0.0, 1.0, 2.0] and filled.table.device.type == "cpu"


def test_a_parameter_that_is_never_filled() -> None:
    with torch.device("meta"):
        model = Filled()
        model.forgotten = nn.Parameter(torch.empty(2))
    fills = record_initialization(model, torch.device("cpu"))
    with pytest.raises(KeyError, match="forgotten"):
        initialize(model, fills, 0, torch.device("cpu"))


def test_torch_init_is_itself_again() -> None:
    record_initialization(build_model(*tiny.qwen3()), torch.device("cpu"))
    assert nn.init.ones_(torch.zeros(2)).tolist() == [1.0, 1.0]


def _tied() -> tuple[bool, list[str], float]:
    name, args = tiny.qwen3()
    model = tiny.build((name, replace(args, enable_weight_tying=True)), Layout(dp_shard=2, tp=2)).model
    names = [name for name, _ in model.named_parameters() if "output" in name or "embeddings" in name]
    return model.output.weight is model.tok_embeddings.weight, names, float(full(model.output.weight).std())


def test_tied_embeddings_are_filled_as_the_output(pool) -> None:
    for tied, names, std in pool.run(4, _tied):
        assert tied and names == ["tok_embeddings.weight"]
        assert std == pytest.approx(24**-0.5, rel=0.1)
