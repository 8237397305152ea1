"""What the last step decided, on its way to the host: one copy behind `commit`, while the draft still runs."""

from dataclasses import dataclass

import torch

from specdec.buffers import StepBuffers
from specdec.logprobs import StepLogprobs


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a step decided, on the host. Lists are per batch slot of the step."""

    sampled_tokens: list[list[int]]  # K + 1 each; num_accepted + 1 of them count
    num_accepted: list[int]
    draft_tokens: list[list[int]]  # what was verified
    logprobs: StepLogprobs | None = None  # of sampled_tokens, one behind another; a chunk has one per batch slot


class Results:
    """The buffers' packed results, in pinned memory on CUDA."""

    def __init__(self, buffers: StepBuffers) -> None:
        results, self._query_len = buffers.results, buffers.sampled_tokens.shape[1]
        self._results = results
        self._results_cpu = torch.zeros(results.shape, dtype=results.dtype, pin_memory=results.is_cuda)
        self._sent = torch.cuda.Event() if results.is_cuda else None  # type: ignore[no-untyped-call]
        self._logprobs: StepLogprobs | None = None

    def send(self, num_reqs: int, logprobs: StepLogprobs | None = None) -> None:
        """Start the copy; nothing waits for it."""
        self._results_cpu[:num_reqs].copy_(self._results[:num_reqs], non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to_host(is_async=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._results.device))

    def read(self, num_reqs: int) -> RoundResult:
        """Wait for the copy, and for no pass behind it."""
        if self._sent is not None:
            self._sent.synchronize()
        rows, Q = self._results_cpu[:num_reqs].tolist(), self._query_len
        tokens, accepted, drafts = [row[:Q] for row in rows], [row[Q] for row in rows], [row[Q + 1 :] for row in rows]
        return RoundResult(tokens, accepted, drafts, self._logprobs)
