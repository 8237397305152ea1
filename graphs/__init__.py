"""Capture and replay of torch callables: breakable and full CUDA graphs, and their twin for CPUs.

The backends are in modules of their own: graphs.cuda.CudaBackend, graphs.tape.backend.TapeBackend.
"""

import importlib

_PUBLIC = {
    "BatchDescriptor": "graphs.modes",
    "BreakableCUDAGraphCapture": "graphs.breakable",
    "BreakableCUDAGraphWrapper": "graphs.wrapper",
    "CUDAGraphMode": "graphs.modes",
    "CUDAGraphOptions": "graphs.wrapper",
    "CUDAGraphWrapper": "graphs.wrapper",
    "CudaGraphManager": "graphs.manager",
    "eager_break_during_capture": "graphs.breakable",
    "get_forward_context": "graphs.context",
    "set_forward_context": "graphs.context",
}
__all__ = sorted(_PUBLIC)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for: graphs.modes needs no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'graphs' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
