"""vLLM's import path: `from specdec.outputs import RequestOutput`."""

from specdec.requests.output import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
