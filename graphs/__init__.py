"""Capture and replay of torch callables: breakable and full CUDA graphs, and a CPU tape that behaves the same.

These names are the library. The backends stay under modules of their own: graphs.cuda (CUDA) and graphs.tape.backend.
"""

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
