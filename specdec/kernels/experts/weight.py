"""The weight of a product of all experts of a layer, in any form: one value up to the kernel."""

from typing import NamedTuple

from torch import Tensor


class Weight(NamedTuple):
    """A product's W [E, N, K], with a bias where there is one.

    Without scales `data` is W. With them it is MXFP4 (mxfp4.py): words [E, K / 64, N / 64, 128, 4]
    int32, and scales [E, K / 128, N] int32, counts rounded up; gate and up have words of their own.
    """

    data: Tensor
    scales: Tensor | None = None
    bias_EN: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return self.scales is not None

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def num_rows(self) -> int:
        """Count the rows of each expert's W: N."""
        return self.data.shape[1] if self.scales is None else self.scales.shape[2]
