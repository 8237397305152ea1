from graphs.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from graphs.context import get_forward_context, set_forward_context
from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.wrapper import BreakableCUDAGraphWrapper, CUDAGraphOptions, CUDAGraphWrapper

__all__ = [
    "BatchDescriptor",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CudaGraphManager",
    "eager_break_during_capture",
    "get_forward_context",
    "set_forward_context",
]
