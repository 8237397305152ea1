"""What steps decided, on its way to the host: written there after `commit`, before the draft runs.

The draft's proposals are copied later, where a grammar has to follow them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.rounds.buffers import CONFIDENCE_ONE, StepBuffers
from specdec.rounds.logprobs import RecordedLogprobs, StepLogprobs
from specdec.rounds.send import sender

NUM_SLOTS = 4  # steps whose results may be on their way at a time


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step decided, on the host. Lists are per batch slot of the step."""

    sampled_tokens: list[list[int]]  # K + 1 each; num_accepted + 1 of them count
    num_accepted: list[int]
    draft_tokens: list[list[int]]  # the drafts that were verified: one for each row that had one
    # of trees: the parent of each of these, 0 for the root and i for the i-th of them; of chains []
    draft_parents: list[list[int]]
    # of trees: the draft's probability of the path to each of these; of a round of chains []
    draft_probs: list[list[float]]
    # [B, K] float32: paths of live drafts by level; [B, 0] where K is fixed, and of trees
    confidences: np.ndarray
    logprobs: StepLogprobs | None = None  # by decided row, see step_sizes.py
    prompt_logprobs: Sequence[StepLogprobs | None] = ()  # one per part of a prompt


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """How a row of the buffers' results is read, of a round of chains or of trees.

    Both have the sampled tokens [path_len] and the number accepted; then the verified drafts
    [num_drafts], their number, and confidences [num_confidences], or of trees the parents and the
    probabilities of the paths [num_drafts].
    """

    path_len: int  # K + 1
    num_drafts: int
    num_confidences: int = 0
    is_tree: bool = False

    def drafts(self, rows: list[list[int]]) -> "Drafts":
        """Cut drafts to the verified ones: nodes of trees that had no row are left out."""
        first = self.path_len + 1
        end = first + self.num_drafts
        if not self.is_tree:
            none: list[list[int]] = [[] for _ in rows]
            return Drafts([row[first : first + row[end]] for row in rows], none, [])
        found = Drafts([], [], [])
        for row in rows:
            tokens, parents = row[first:end], row[end + 1 :][: self.num_drafts]
            probs = row[end + 1 + self.num_drafts :]
            kept = [i for i, parent in enumerate(parents) if parent >= 0]
            number = {0: 0} | {i + 1: n for n, i in enumerate(kept, start=1)}
            found.tokens.append([tokens[i] for i in kept])
            found.parents.append([number[parents[i]] for i in kept])
            found.probs.append([probs[i] / CONFIDENCE_ONE for i in kept])
        return found


class Drafts(NamedTuple):
    """The verified drafts by batch slot, see StepResult."""

    tokens: list[list[int]]
    parents: list[list[int]]
    probs: list[list[float]]


@dataclass(slots=True)
class HostWaits:
    """How long the host has waited for results of an engine's steps."""

    seconds: float = 0.0


@dataclass(slots=True)
class PendingResult:
    """A step's results on their way; read them before NUM_SLOTS further steps are launched."""

    rows_cpu: Tensor  # [B, X] as in the buffers
    columns: ResultColumns
    sent: torch.cuda.Event | None
    logprobs: StepLogprobs | None = None
    prompt_logprobs: list[StepLogprobs | None] = field(default_factory=list)
    # drafts for the next round, if they were sent: chains [1, B, K], or trees with the parents of
    # their nodes [2, B, N - 1]
    proposals_cpu: Tensor | None = None
    proposed: torch.cuda.Event | None = None
    _proposals: "Proposals | None" = None  # once they were read
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
        columns = self.columns
        Q = columns.path_len
        first = Q + 2 + columns.num_drafts
        found = self.rows_cpu.numpy()  # numpy's tolist takes half as long as a tensor's
        rows = (found if columns.is_tree else found[:, :first]).tolist()
        drafts = columns.drafts(rows)
        confidences = found[:, first : first + columns.num_confidences]
        return StepResult(
            sampled_tokens=[row[:Q] for row in rows],
            num_accepted=[row[Q] for row in rows],
            draft_tokens=drafts.tokens,
            draft_parents=drafts.parents,
            draft_probs=drafts.probs,
            confidences=confidences.astype(np.float32) / CONFIDENCE_ONE,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def read_proposals(self) -> "Proposals":
        """The drafts that this step proposed. Waits for the draft's passes."""
        assert self.proposals_cpu is not None, "no proposals were sent"
        if self._proposals is None:
            if self.proposed is not None:
                self.proposed.synchronize()
            self._proposals = Proposals(*self.proposals_cpu.tolist())
        return self._proposals


class Proposals(NamedTuple):
    """By batch slot. parents: of the nodes of trees, see requests/draft_tree.py; None: chains."""

    tokens: list[list[int]]
    parents: list[list[int]] | None = None


class SentProposals:
    """Proposals [B, X] of one kind in pinned memory, one slot for each step on its way."""

    def __init__(self, proposed: Sequence[Tensor]) -> None:
        self._proposed = proposed
        first = proposed[0]
        shape = (NUM_SLOTS, len(proposed), *first.shape)
        self._slots_cpu = torch.zeros(shape, dtype=first.dtype, pin_memory=first.is_cuda)

    def send(self, slot: int, num_reqs: int) -> Tensor:
        """Start the copy, to where it returns."""
        slot_cpu = self._slots_cpu[slot, :, :num_reqs]
        for place_cpu, proposed in zip(slot_cpu, self._proposed, strict=True):
            place_cpu.copy_(proposed[:num_reqs], non_blocking=True)
        return slot_cpu


class Results:
    """The buffers' packed results in pinned memory, one slot for each step on its way."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._results = results = buffers.results
        shape = (NUM_SLOTS, *results.shape)
        self._slots_cpu = torch.zeros(shape, dtype=results.dtype, pin_memory=results.is_cuda)
        Q, K = buffers.sampled_tokens.shape[1], buffers.verified_tokens.shape[1]
        self._columns = ResultColumns(Q, K, buffers.confidences.shape[1])
        self._chains = SentProposals([buffers.draft_tokens])
        tree = buffers.tree
        if tree is not None:
            self._columns_of_trees = ResultColumns(Q, tree.shape.num_nodes, is_tree=True)
            self._trees = SentProposals([tree.proposed_nodes, tree.proposed_parents])
        self._sent = [
            torch.cuda.Event(enable_timing=True) if results.is_cuda else None  # type: ignore[no-untyped-call]
            for _ in range(NUM_SLOTS)
        ]
        self._send = sender(results)
        self._num_sent = 0
        self.waits = HostWaits()
        self.latest = PendingResult(self._slots_cpu[0, :0], self._columns, None)

    def send(self, num_reqs: int, logprobs: RecordedLogprobs, are_trees: bool = False) -> None:
        """Send the results; nothing waits for them here. `latest` is where they arrive.

        are_trees: whether trees were verified
        """
        slot = self._num_sent % NUM_SLOTS
        self._num_sent += 1
        rows_cpu = self._slots_cpu[slot, :num_reqs]
        self._send(rows_cpu)
        sampled, *prompts = [
            None if part is None else part.to_host()
            for part in (logprobs.sampled, *logprobs.prompts)
        ]
        columns = self._columns_of_trees if are_trees else self._columns
        sent, waits = self._sent[slot], self.waits
        self.latest = PendingResult(rows_cpu, columns, sent, sampled, prompts, waits=waits)
        if self.latest.sent is not None:
            self.latest.sent.record(torch.cuda.current_stream(self._results.device))

    def send_proposals(self, num_reqs: int, are_trees: bool = False) -> None:
        """Start the copy of the latest step's proposals, for a host that has to know them."""
        slot = (self._num_sent - 1) % NUM_SLOTS
        proposals = self._trees if are_trees else self._chains
        self.latest.proposals_cpu = proposals.send(slot, num_reqs)
        if self._results.is_cuda:
            self.latest.proposed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.latest.proposed.record(torch.cuda.current_stream(self._results.device))
