"""The weight of a product of all experts of a layer, in any form: one value up to the kernel."""

from typing import Literal, NamedTuple

from torch import Tensor

from specdec.kernels.fp8.weight import E4M3

Form = Literal["plain", "packed", "fp8"]


class Weight(NamedTuple):
    """A product's W [E, N, K], with a bias where there is one.

    plain: `data` is W. packed: it is MXFP4 (mxfp4.py): words [E, K / 64, N / 64, 128, 4] int32, and
    scales [E, K / 128, N] int32, counts rounded up; gate and up have words of their own. fp8: codes
    [E, N, K], and float32 scales [E, N] or [E, K / 128, N], rounded up, each expert's as in `Fp8`.
    """

    data: Tensor
    scales: Tensor | None = None
    bias_EN: Tensor | None = None

    @property
    def form(self) -> Form:
        if self.data.dtype == E4M3:
            return "fp8"
        return "plain" if self.scales is None else "packed"

    @property
    def is_block(self) -> bool:
        """Whether 8-bit numbers have a scale for each 128 of K."""
        return self.form == "fp8" and self.scales is not None and self.scales.dim() == 3

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def num_rows(self) -> int:
        """Count the rows of each expert's W: N."""
        if self.form == "packed" and self.scales is not None:
            return self.scales.shape[2]
        return self.data.shape[1]
