"""What no capture can hold: host reads of the device, shapes made of data, torch's generator.

On CUDA these fail with whatever error the driver finds. The tape names them: a dispatch mode sees
the ops, a function mode the calls that are none on CPU tensors (.tolist(), .cpu(), .numpy()).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from graphs.protocol import CaptureError

_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
_DATA_SHAPES = (
    *("nonzero", "nonzero_numpy", "masked_select"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive"),
)
_INDEX_OPS = ("index", "index_put", "index_put_", "_index_put_impl_")
_CALLS = (
    *("cpu", "numpy", "tolist", "item", "__array__", "__repr__"),
    *("__bool__", "__int__", "__float__", "__index__"),
)


def check_op(func: "OpOverload[..., object]", args: tuple[object, ...]) -> None:
    """CaptureError if `func` could not be captured."""
    name = func.overloadpacket.__name__
    if name in _READS:
        raise _host_read(str(func))
    repeats_data = name == "repeat_interleave" and isinstance(args[0], Tensor) and len(args) == 1
    if name in _DATA_SHAPES or repeats_data:
        remedy = "use torch.where, or an index of fixed size"
        raise CaptureError(f"{func} makes a shape out of data: {remedy}")
    if name in _INDEX_OPS and has_masks(args) and not _is_masked_fill(args):
        raise CaptureError(f"{func} with a boolean mask makes a shape out of data: use torch.where")
    if torch.Tag.nondeterministic_seeded in func.tags:
        remedy = "use a counter-based one with its state in a buffer"
        raise CaptureError(f"{func} draws from torch's generator: {remedy}")


class ForbidHostReads(TorchFunctionMode):
    """Raises CaptureError for the calls that read a tensor from the host."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _CALLS and getattr(Tensor, name, None) is func:
            raise _host_read(f"Tensor.{name}")
        if func is torch.tensor and kwargs.get("device") is not None:
            problem = "torch.tensor(..., device=...) copies from the host"
            raise CaptureError(f"{problem}: make the tensor before the capture")
        return func(*args, **kwargs)


def _host_read(name: str) -> CaptureError:
    rule = "nothing inside a captured region may"
    return CaptureError(f"{name} reads the device from the host: {rule}")


def has_masks(args: tuple[object, ...]) -> bool:
    """Whether an index op is given a boolean mask."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    tensors = [index for index in indices if isinstance(index, Tensor)]
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _is_masked_fill(args: tuple[object, ...]) -> bool:
    """x[mask] = one value: torch fills it without counting the mask."""
    value = args[2] if len(args) > 2 else None
    return isinstance(value, Tensor) and value.numel() == 1 and not any(args[3:4])
