"""Host numbers to the device, without waiting for it."""

import numpy as np
import torch
from torch import Tensor


def upload(buffer: Tensor, values: np.ndarray | Tensor) -> None:
    """Write `values`, which lie on the host, to the first rows of `buffer`."""
    buffer[: len(values)].copy_(_staged(values, buffer.device), non_blocking=True)


def uploaded(values: np.ndarray, device: torch.device) -> Tensor:
    """A new tensor on the device."""
    return _staged(values, device).to(device, non_blocking=True)


def _staged(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    host = torch.as_tensor(values)
    # the copy of pageable memory is staged by the driver, which may wait for the stream
    return host.pin_memory() if device.type == "cuda" else host
