"""This is vLLM's import path: `from specdec.sampling_params import SamplingParams`."""

from specdec.requests.params import RequestOutputKind, SamplingParams
from specdec.requests.structured_outputs import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
