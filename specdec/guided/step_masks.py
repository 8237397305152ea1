"""The masks of a step: a guide walks the drafts of its request, row by row.

Row 0 of a slot that verifies comes after the request's last token, row i after its first i drafts;
the end of a prompt has one row. The walk stops at the first draft that may not follow: the target
cannot choose it, so no later row counts. A tree has a walk for each of its leaves, without the
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
from typing import NamedTuple

import numpy as np

from specdec.guided.mask_threads import MaskThreads, Walk
from specdec.requests.draft_tree import leaf_paths
from specdec.requests.guide import Guide
from specdec.requests.request import Request
from specdec.scheduling.work import Work
from specdec.stepping.results import PendingResult
from specdec.stepping.step_sizes import RowMasks


@dataclass(frozen=True, slots=True)
class GuidedSlot:
    """first_row: of its decided rows, if each slot had num_rows of them. num_drafts: that it
    verifies, of a tree one after another. drafts: where they arrive, as a row of a step's
    proposals; of a tree's nodes the first ones have rows.
    """

    guide: Guide
    first_row: int
    num_rows: int = 1
    num_drafts: int = 0
    drafts: tuple[PendingResult, int] | None = None

    def paths(self) -> list["GuidedPath"]:
        """Yield paths from the slot's first row to each of its last. Waits for the drafts."""
        if self.num_drafts == 0:
            return [GuidedPath(self.guide, (), [self.first_row])]
        assert self.drafts is not None, "drafts that were never sent"
        pending, b = self.drafts
        proposals = pending.read_proposals()
        tokens, n = proposals.tokens[b], self.num_drafts
        if proposals.parents is None:
            rows = range(self.first_row, self.first_row + n + 1)
            return [GuidedPath(self.guide, tokens[:n], rows)]
        verified = proposals.parents[b][: self.num_rows - 1]
        return list(self._branches(tokens, leaf_paths(verified, n)))

    def _branches(self, tokens: Sequence[int], paths: list[list[int]]) -> Iterator["GuidedPath"]:
        """Yield a tree's paths, rows from its root on, each without masks of those before it."""
        seen: set[int] = set()
        for path in paths:
            drafts = [tokens[row - 1] for row in path[1:]]
            rows = [self.first_row + row for row in path]
            yield GuidedPath(self.guide, drafts, rows, len(seen.intersection(path)))
            seen.update(path)


class GuidedPath(NamedTuple):
    """Drafts to follow, and the decided rows that the masks are for: one more than drafts.

    first: the number of rows, from the root on, that another path finds the masks of.
    """

    guide: Guide
    drafts: Sequence[int]
    rows: Sequence[int]
    first: int = 0

    def walks(self) -> Iterator[tuple[Walk, Sequence[int]]]:
        """Yield the walks of its parts, each with its rows."""
        parts = self.guide.parts(self.first, len(self.rows))
        ends = [*(part.first for part in parts[1:]), len(self.rows)]
        for part, end in zip(parts, ends, strict=True):
            yield (part.walker, self.drafts[: end - 1]), self.rows[part.first : end]


class StepMasks:
    """Knows where the drafts of guided requests arrive, from one launched step to the next."""

    def __init__(self) -> None:
        self._arriving: dict[Request, tuple[PendingResult, int]] = {}
        self._threads = MaskThreads()
        self._early = Early()

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
                Q = work.query_len
                slots.append(GuidedSlot(request.guide, b * Q, Q, count, drafts))
        for i, (request, part) in enumerate(zip(work.prompts, work.parts, strict=True)):
            if request.guide is not None and part.samples:
                row = len(work.verifying) * work.query_len + i
                slots.append(GuidedSlot(request.guide, row))
        if not slots:
            return None
        found = partial(row_masks, self._threads, slots)
        return self._early.begin(found) if work.parts else found

    def launched(self, work: Work, result: PendingResult) -> None:
        """Keep the step: a guided request verifies in each until it ends, so the latest counts."""
        self._arriving = {
            request: (result, b)
            for b, request in enumerate(work.requests)
            if request.guide is not None
        }


class Early:
    """Runs functions, one at a time, while the caller goes on."""

    def __init__(self) -> None:
        self._pid = -1  # a fork leaves the thread out

    def begin(self, function: Callable[[], RowMasks]) -> Callable[[], RowMasks]:
        """Begin a call; return what waits for its result."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-early-masks")
        return self._pool.submit(function).result


def row_masks(threads: MaskThreads, slots: Sequence[GuidedSlot]) -> RowMasks:
    """Compute the masks of the slots' rows, as far as their walks go. Waits for the drafts."""
    walks, rows = zip(
        *(each for slot in slots for path in slot.paths() for each in path.walks()), strict=True
    )
    masks: dict[int, bytes] = {}
    for places, found in zip(rows, threads.masks(walks), strict=True):
        masks |= zip(places, found, strict=False)  # a walk may end early
    for slot in slots:
        if slot.guide.is_given_up:
            masks[slot.first_row] = bytes(len(masks[slot.first_row]))
    bits = np.frombuffer(bytearray().join(masks.values()), np.int32).reshape(len(masks), -1)
    return RowMasks(np.fromiter(masks, np.int64), bits)
