"""Host numbers into a static buffer, without waiting for the device."""

import numpy as np
import torch
from torch import Tensor


def upload(buffer: Tensor, values: np.ndarray | Tensor) -> None:
    """Write `values`, which lie on the host, to the first rows of `buffer`."""
    host = torch.as_tensor(values)
    # the copy of pageable memory is staged by the driver, which may wait for the stream
    buffer[: len(values)].copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)
