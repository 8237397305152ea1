"""The masks of a step: a guide walks the drafts of its request, row by row.

Row 0 of a slot that verifies comes after the request's last token, row i after its first i drafts;
the end of a prompt has one row. The walk stops at the first draft that may not follow: the target
cannot choose it, so no later row counts. Branches have a walk for each of their leaves, without the
masks that one before it finds. Once a guide is given up, its first row allows nothing.

The drafts were sent to the host at the end of the step before, and the masks are taken while the
device runs the target's forward, on threads of their own (mask_threads.py). To launch a forward in
pieces takes the host about as long as the device to run it, so beside prompts the masks are begun
before it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from specdec.guided.mask_threads import MaskThreads, Walk
from specdec.requests.draft_tree import leaf_paths
from specdec.requests.request import Request
from specdec.requests.structured_outputs import Guide
from specdec.rounds.results import PendingResult
from specdec.rounds.step_sizes import RowMasks
from specdec.scheduling.work import Work


@dataclass(frozen=True, slots=True)
class GuidedSlot:
    """first_row: of its decided rows, if each slot had num_rows of them. num_drafts: that it
    verifies, branches one after another. drafts: where they arrive, as a row of a step's
    proposals; the first ones have rows.
    """

    guide: Guide
    first_row: int
    num_rows: int = 1
    num_drafts: int = 0
    drafts: tuple[PendingResult, int] | None = None

    def walks(self) -> Iterator[tuple[Walk, Sequence[int]]]:
        """Yield walks with their rows, each row once. Waits for the drafts."""
        tokens: Sequence[int] = ()
        parents: Sequence[int] = ()
        if self.num_drafts > 0:
            assert self.drafts is not None, "drafts that were never sent"
            pending, b = self.drafts
            found = pending.read_proposals()
            tokens = found.tokens[b]
            parents = found.parents[b][: self.num_rows - 1]
        seen: set[int] = set()
        for path in leaf_paths(parents, self.num_drafts):
            drafts = [tokens[row - 1] for row in path[1:]]
            parts = self.guide.parts(len(seen.intersection(path)), len(path))
            ends = [*(first for first, _ in parts[1:]), len(path)]
            for (first, guide), end in zip(parts, ends, strict=True):
                rows = [self.first_row + row for row in path[first:end]]
                yield Walk(guide, drafts[: end - 1], first), rows
            seen.update(path)


class StepMasks:
    """Knows where the drafts of guided requests arrive, from one launched step to the next."""

    def __init__(self) -> None:
        self._arriving: dict[Request, tuple[PendingResult, int]] = {}
        self._threads = MaskThreads()
        self._pid = -1

    def of_step(
        self, work: Work, num_drafts: Callable[[Request], int]
    ) -> Callable[[], RowMasks] | None:
        """Return what computes the masks of a step to be launched; None: no row has one.

        num_drafts: how many drafts a request verifies
        """
        slots = []
        for b, request in enumerate(work.verifying):
            if request.guide is not None:
                count = min(num_drafts(request), work.most_drafts)
                drafts = self._arriving.get(request)
                Q = work.shape.rows
                slots.append(GuidedSlot(request.guide, b * Q, Q, count, drafts))
        for i, (request, part) in enumerate(zip(work.prompts, work.parts, strict=True)):
            if request.guide is not None and part.samples:
                row = len(work.verifying) * work.shape.rows + i
                slots.append(GuidedSlot(request.guide, row))
        if not slots:
            return None
        found = partial(row_masks, self._threads, slots)
        if not work.parts:
            return found
        if self._pid != os.getpid():  # a fork leaves the thread out
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-early-masks")
        return self._pool.submit(found).result

    def launched(self, work: Work, result: PendingResult) -> None:
        """Keep the step: a guided request verifies in each until it ends, so the latest counts."""
        self._arriving = {
            request: (result, b)
            for b, request in enumerate(work.requests)
            if request.guide is not None
        }


def row_masks(threads: MaskThreads, slots: Sequence[GuidedSlot]) -> RowMasks:
    """Compute the masks of the slots' rows, as far as their walks go. Waits for the drafts."""
    walks, rows = zip(*(each for slot in slots for each in slot.walks()), strict=True)
    masks: dict[int, bytes] = {}
    for places, found in zip(rows, threads.masks(walks), strict=True):
        masks |= zip(places, found, strict=False)  # a walk may end early
    for slot in slots:
        if slot.guide.is_given_up:
            masks[slot.first_row] = bytes(len(masks[slot.first_row]))
    bits = np.frombuffer(bytearray().join(masks.values()), np.int32).reshape(len(masks), -1)
    return RowMasks(np.fromiter(masks, np.int64), bits)
