"""What steps decided, on its way to the host: written there after `commit`, before the draft runs.

The draft's proposals are copied later, where a grammar has to follow them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels import jit, launch_options, pick, tl
from specdec.kernels.overlap import begin
from specdec.kernels.repeated import Repeated
from specdec.rounds.buffers import CONFIDENCE_ONE, ResultColumns, StepBuffers
from specdec.rounds.logprobs import RecordedLogprobs, StepLogprobs

NUM_SLOTS = 4  # steps whose results may be on their way at a time
AT_ONCE = 1024  # numbers that a program of the kernel sends


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step decided, on the host. Lists are per batch slot of the step."""

    sampled_tokens: list[list[int]]  # K + 1 each; num_accepted + 1 of them count
    num_accepted: list[int]
    draft_tokens: list[list[int]]  # the nodes that were verified: one for each row that had one
    # the parent of each of these, 0 for the root and i for the i-th of them; [] where all drafts
    # are chains
    draft_parents: list[list[int]]
    # [B, X] float32, that a live node and all above it hold, verified or not, 0 = not live; [B, 0]
    # where nothing learns from it
    path_probs: np.ndarray
    logprobs: StepLogprobs | None = None  # by decided row, see step.py
    prompt_logprobs: Sequence[StepLogprobs | None] = ()  # one per part of a prompt


class Proposals(NamedTuple):
    """The nodes that a step proposed, by batch slot. parents: see requests/draft_tree.py."""

    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]


@dataclass(slots=True)
class HostWaits:
    """How long the host has waited for results of an engine's steps."""

    seconds: float = 0.0


@dataclass(slots=True)
class PendingResult:
    """A step's results on their way; read them before NUM_SLOTS further steps are launched."""

    rows_cpu: Tensor  # [B, ...] as in the buffers
    widths: list[int]  # numbers of its columns
    sent: torch.cuda.Event | None
    logprobs: StepLogprobs | None = None
    prompt_logprobs: list[StepLogprobs | None] = field(default_factory=list)
    # nodes for the next round, and their parents, [B, X] each, if they were sent
    proposals_cpu: Sequence[Tensor] = ()
    proposed: torch.cuda.Event | None = None
    _proposals: Proposals | None = None  # once they were read
    number: int = 0  # counts the steps of a runner, from 1 on
    waits: HostWaits = field(default_factory=HostWaits)  # the time of `wait` is added there

    def ms_after(self, earlier: "PendingResult") -> float | None:
        """Milliseconds on the device from the result of the step before; None without its clock.

        Both were read.
        """
        if self.sent is None or earlier.sent is None:
            return None
        return float(earlier.sent.elapsed_time(self.sent))

    def wait(self) -> None:
        """Wait for the results, and for no later pass."""
        if self.sent is not None:
            began = time.monotonic()
            self.sent.synchronize()
            self.waits.seconds += time.monotonic() - began

    def read(self) -> StepResult:
        """Read the result, once it has arrived."""
        self.wait()
        columns = ResultColumns(*torch.split(self.rows_cpu, self.widths, dim=1))
        counts = _listed(columns.num_verified_nodes[:, 0])

        def verified(nodes: Tensor) -> list[list[int]]:
            return [row[:n] for row, n in zip(_listed(nodes), counts, strict=True)]

        return StepResult(
            sampled_tokens=_listed(columns.sampled_tokens),
            num_accepted=_listed(columns.num_accepted[:, 0]),
            draft_tokens=verified(columns.tokens),
            draft_parents=verified(columns.parents),
            path_probs=columns.probs.numpy().astype(np.float32) / CONFIDENCE_ONE,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def read_proposals(self) -> Proposals:
        """The nodes that this step proposed. Waits for the draft's passes."""
        assert self.proposals_cpu, "no proposals were sent"
        if self._proposals is None:
            if self.proposed is not None:
                self.proposed.synchronize()
            tokens, parents = map(_listed, self.proposals_cpu)
            if not any(parents):  # all drafts are chains
                parents = [range(len(row)) for row in tokens]
            self._proposals = Proposals(tokens, parents)
        return self._proposals


class Results:
    """The buffers' results and proposals in pinned memory, a slot for each step on its way."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._results = results = buffers.results
        self._proposed = buffers.proposed_tokens, buffers.proposed_parents
        self._slots_cpu = _slots_for(results)
        self._proposals_cpu = [_slots_for(nodes) for nodes in self._proposed]
        self._widths = [column.shape[1] for column in buffers.columns]
        self._sent = [
            torch.cuda.Event(enable_timing=True) if results.is_cuda else None
            for _ in range(NUM_SLOTS)
        ]
        self._send = pick(results, kernel_sender, twin_sender)(results)
        self._num_sent = 0
        self.waits = HostWaits()
        self.latest = PendingResult(self._slots_cpu[0, :0], self._widths, None)

    def send(self, num_reqs: int, logprobs: RecordedLogprobs) -> None:
        """Send the results; nothing waits for them here. `latest` is where they arrive."""
        slot = self._num_sent % NUM_SLOTS
        self._num_sent += 1
        rows_cpu = self._slots_cpu[slot, :num_reqs]
        self._send(rows_cpu)
        sampled, *prompts = [
            None if part is None else part.to_host()
            for part in (logprobs.sampled, *logprobs.prompts)
        ]
        sent, waits = self._sent[slot], self.waits
        self.latest = PendingResult(rows_cpu, self._widths, sent, sampled, prompts, waits=waits)
        self.latest.number = self._num_sent
        if self.latest.sent is not None:
            self.latest.sent.record(torch.cuda.current_stream(self._results.device))

    def send_proposals(self, num_reqs: int) -> None:
        """Start the copy of the latest step's proposals, for a host that has to know them."""
        slot = (self._num_sent - 1) % NUM_SLOTS
        places = [slots_cpu[slot, :num_reqs] for slots_cpu in self._proposals_cpu]
        for place_cpu, nodes in zip(places, self._proposed, strict=True):
            place_cpu.copy_(nodes[:num_reqs], non_blocking=True)
        self.latest.proposals_cpu = places
        if self._results.is_cuda:
            self.latest.proposed = torch.cuda.Event()
            self.latest.proposed.record(torch.cuda.current_stream(self._results.device))


def _slots_for(rows: Tensor) -> Tensor:
    is_pinned = rows.is_cuda and rows.numel() > 0
    return torch.zeros((NUM_SLOTS, *rows.shape), dtype=rows.dtype, pin_memory=is_pinned)


def _listed(numbers: Tensor) -> list[Any]:
    listed: list[Any] = numbers.numpy().tolist()  # which takes half as long as a tensor's
    return listed


def kernel_sender(rows_BX: Tensor) -> Callable[[Tensor], object]:
    """Return a function that sends the first of these rows, as many as its argument has.

    The kernel writes them to pinned memory of the host in 1 to 3 microseconds; the copy engine took
    8. Nothing waits for them there.
    """
    options = launch_options(rows_BX)
    grid = -(-rows_BX.numel() // AT_ONCE), 1, 1
    constants = {"AT_ONCE": AT_ONCE, "PDL": options["PDL"]}
    send = Repeated(_send_kernel, grid, then=(), constants=constants, options=options)
    return lambda host_NX: send(host_NX, rows_BX, host_NX.numel())


def twin_sender(rows_BX: Tensor) -> Callable[[Tensor], object]:
    return lambda host_NX: host_NX.copy_(rows_BX[: len(host_NX)])


@jit(varying=("host_ptr", "num_numbers"))
def _send_kernel(
    host_ptr,  # [N, X]
    rows_ptr,  # [B, X]
    num_numbers,  # N x X
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    number = tl.load(rows_ptr + i, mask=i < num_numbers)
    tl.store(host_ptr + i, number, mask=i < num_numbers)
