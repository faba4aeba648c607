"""Quantisers against cases worked by hand, the formats' definitions, and torchao's own."""

import float8_reference
import pytest
import torch

from float8.recipes import RECIPES, Quantizer, rotate_rows

OPERANDS = ("input", "weight", "grad")
NEAREST = Quantizer("e2m1", (1, 16), "e4m3")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def quantizer(recipe: str, operand: str) -> Quantizer:
    """The one of a recipe, or its deterministic twin."""
    found = getattr(RECIPES[recipe], operand)
    return NEAREST if found.stochastic else found


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of many magnitudes."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape))).to(dtype)


def test_tensorwise_by_hand() -> None:
    x = torch.tensor([[224.0, -50.0], [0.3, 1.0]])  # Twice that is rounded to E4M3.
    elements, scale = RECIPES["tensorwise"].input.quantize(x, 1)
    assert elements.dtype == torch.float8_e4m3fn
    assert elements.tolist() == [[448, -96], [0.625, 2]] and scale.tolist() == [[0.5]]  # -100 is a tie between -96 and -104.
    elements, scale = RECIPES["tensorwise"].grad.quantize(x, 1)
    assert elements.dtype == torch.float8_e5m2
    assert elements.tolist() == [[57344, -12288], [80, 256]] and scale.tolist() == [[2**-8]]


def test_rowwise_by_hand() -> None:
    x = torch.tensor([[3.0, 0.3], [-0.125, 0.01]])
    elements, scale = RECIPES["rowwise"].input.quantize(x, 1)  # 448 / 3 and 448 / 0.125, down to powers of two
    assert scale.tolist() == [[1 / 128], [1 / 2048]]
    assert elements.tolist() == [[384, 40], [-256, 20]]
    _, scale = RECIPES["rowwise"].input.quantize(x, 0)
    assert scale.tolist() == [[1 / 128, 1 / 1024]]


def test_mxfp8_by_hand() -> None:
    x = torch.zeros(1, 40)
    x[0, :3] = torch.tensor([500.0, 3.3, -250.0])
    x[0, 32:34] = torch.tensor([448.0, 1.0])
    elements, scale = RECIPES["mxfp8"].input.quantize(x, 1)
    assert scale.tolist() == [[2, 1]]  # Rounded up, so that 500 is not cut down to 448.
    assert elements[0, :3].tolist() == [256, 1.625, -128] and elements[0, 32:34].tolist() == [448, 1]


def test_nvfp4_by_hand() -> None:
    x = torch.zeros(2, 16)
    x[0, :3] = torch.tensor([2688.0, -1100.0, 112.0])  # 6 times 448: the scale of the tensor is 1.
    x[1, :3] = torch.tensor([10.0, 3.0, -0.3])
    elements, scale = RECIPES["nvfp4"].input.quantize(x, 1)
    assert scale.tolist() == [[448], [1.625]]  # 10 / 6 in E4M3
    assert elements[0, :3].tolist() == [6, -2, 0]  # 1100 / 448 = 2.46, 112 / 448 is a tie between 0 and 0.5.
    assert elements[1, :3].tolist() == [6, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_the_definition(recipe, operand, dtype) -> None:
    for shape in ((1, 1), (130, 131), (31, 260)):
        x = spread(*shape, dtype=dtype)
        x[: shape[0] // 2, shape[1] // 2] = 0
        for axis in (0, 1):
            actual = quantizer(recipe, operand).simulate(x, axis).double()
            expected = float8_reference.simulate(x, axis, recipe, operand)
            # An element times its scale is rounded to fp32 there.
            torch.testing.assert_close(actual, expected, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_linear_casts_of_torchao(recipe) -> None:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    config = Float8LinearConfig.from_recipe_name(recipe)
    x = spread(48, 80, dtype=torch.bfloat16)
    for operand, cast in (("input", config.cast_config_input), ("grad", config.cast_config_grad_output)):
        for axis in (0, 1):
            theirs = hp_tensor_to_float8_dynamic(
                x,
                cast.target_dtype,
                None,
                scaling_granularity=cast.scaling_granularity,
                axiswise_dim=get_maybe_axiswise_dim(-axis, cast.scaling_granularity),
                round_scales_to_power_of_2=config.round_scales_to_power_of_2,
            )
            elements, scale = quantizer(recipe, operand).quantize(x, axis)
            assert elements.dtype == cast.target_dtype
            assert torch.equal(elements.float(), theirs._data.float())
            assert torch.equal(scale.flatten(), 1 / theirs._scale.flatten())


def test_blockwise_casts_of_torchao() -> None:
    from torchao.prototype.blockwise_fp8_training import kernels as theirs

    x = spread(128, 256)
    ours = RECIPES["blockwise"]
    for (elements, scale), expected in (
        (ours.input.quantize(x, 1), theirs.torch_blockwise_scale_act_quant_lhs(x)),
        (ours.grad.quantize(x, 0), theirs.torch_blockwise_scale_act_quant_rhs(x)),
        (ours.weight.quantize(x, 1), theirs.torch_blockwise_scale_weight_quant(x)),
    ):
        assert torch.equal(elements.float(), expected[0].float()) and torch.equal(scale, expected[1])


def test_mxfp8_casts_of_torchao() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x = spread(64, 96, dtype=torch.bfloat16)
    scale, elements = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = RECIPES["mxfp8"].input.quantize(x, 1)
    assert torch.equal(ours.elements.float(), elements.float()) and torch.equal(ours.scale, scale.float())


def test_nvfp4_casts_of_torchao() -> None:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = spread(64, 96, dtype=torch.bfloat16)
    tensor_scale = per_tensor_amax_to_scale(x.abs().amax())
    scale, packed = nvfp4_quantize(x, per_tensor_scale=tensor_scale)
    ours = RECIPES["nvfp4"].input.quantize(x, 1)
    assert torch.equal(ours.elements, f4_unpacked_to_f32(unpack_uint4(packed)))
    assert torch.equal(ours.scale, scale.float() * tensor_scale)


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    x = torch.rand(400, 512) * 6
    x[:, ::16] = 6 * 448  # Scales are 448 and the tensor's 1: all others are rounded to 0 or to 224.
    simulated = RECIPES["nvfp4"].grad.simulate(x, 1)
    small = torch.arange(512) % 16 != 0
    assert torch.equal(simulated, RECIPES["nvfp4"].grad.simulate(x, 1))
    assert simulated[:, small].unique().tolist() == [0, 224]
    chance = x[:, small].double() / 224
    deviation = (simulated[:, small] / 224 - chance).sum() / (chance * (1 - chance)).sum().sqrt()
    assert abs(deviation) < 4
    assert RECIPES["nvfp4"].input.simulate(x, 1)[:, small].abs().max() == 0


def test_rotation_keeps_products_and_spreads_outliers() -> None:
    x, y = torch.randn(37, 5, dtype=torch.float64), torch.randn(37, 3, dtype=torch.float64)
    torch.testing.assert_close(rotate_rows(x).t() @ rotate_rows(y), x.t() @ y, rtol=1e-12, atol=1e-12)
    outlier = torch.zeros(16, 1)
    outlier[5] = 4
    assert rotate_rows(outlier).abs().flatten().tolist() == [1] * 16


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_extreme_operands(recipe, operand) -> None:
    quantize = getattr(RECIPES[recipe], operand)
    for axis in (0, 1):
        assert not quantize.simulate(torch.zeros(20, 33), axis).any()
        x = torch.randn(20, 33)
        x[3, 4] = 1e30
        out = quantize.simulate(x, axis)
        assert out.isfinite().all() and abs(out[3, 4] / 1e30 - 1) < 0.05
        for value in (float("nan"), float("inf")):
            x[3, 4] = value
            assert not quantize.simulate(x, axis)[3, 4].isfinite()
