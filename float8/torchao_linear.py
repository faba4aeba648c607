"""torchao's FP8 linear layer, also under tensor parallelism."""

from torch import Tensor, nn
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

from float8.shards import on_shards


class TorchaoLinear(Float8Linear):
    """Takes over the parameters of a linear layer without bias; ``recipe`` is one that torchao knows by that name."""

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str) -> "TorchaoLinear":
        return cls.from_float(linear, Float8LinearConfig.from_recipe_name(recipe))

    def forward(self, input: Tensor) -> Tensor:
        return on_shards(self._product, input, self.weight)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), self.linear_mm_config, self.config)
