"""The output projection, which gives the loss itself when it is told what to expect."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from kernels.cross_entropy import HeadProducts, linear_cross_entropy_sums
from parallelisms.sharding_plan import local


class Head(nn.Linear):
    """Takes the place of a model's ``output`` under the same name and shape.

    With tensor parallelism it sees the whole sequence and holds its share of the vocabulary, over ``group``.
    """

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.group: ProcessGroup | None = None
        self.products: Callable[[Tensor], HeadProducts] = HeadProducts
        self._expected: tuple[Tensor, int, tuple[float, ...]] | None = None

    @contextmanager
    def expecting(self, labels_BS: Tensor, ignored: int, scales: tuple[float, ...] = (1.0,)) -> Iterator[None]:
        """Within it, the model's forward returns sums of the cross-entropy over positions whose label is not ``ignored``:
        that in which each of N equal parts of the batch is scaled, and without gradient the [N] sums of the parts, unscaled.

        Args:
            labels_BS: of the batch that the head sees.
            scales: what each part counts for.
        """
        self._expected = labels_BS.flatten(), ignored, scales
        try:
            yield
        finally:
            self._expected = None

    def forward(self, h_BSD: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        weight_VD = local(self.weight)
        if self._expected is None:
            return nn.functional.linear(h_BSD, weight_VD)
        return linear_cross_entropy_sums(h_BSD.flatten(0, 1), weight_VD, *self._expected, self.group, self.products)
