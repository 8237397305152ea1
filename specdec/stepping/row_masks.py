"""The tokens that a grammar allows after rows of a step, in host numbers."""

from typing import NamedTuple

import numpy as np


class RowMasks(NamedTuple):
    """The masks of X decided rows; all other rows may take any token. Letters: V vocabulary."""

    row_X: np.ndarray  # int64
    bits_XW: np.ndarray  # int32 [X, ceil(V / 32)] a bit for each id, the lowest first
