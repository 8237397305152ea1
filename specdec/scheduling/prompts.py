"""Which rows of prompts ride in a step, beside the requests that verify.

As many as keep the step within a multiple of its time without them (step_costs.py), more where many
wait, and all that fit while nothing runs.
"""

import itertools
from dataclasses import replace

from specdec.requests.request import Request
from specdec.scheduling.step_costs import PromptBudget
from specdec.scheduling.work import Work, work_of
from specdec.sizes import PLAIN

ARRIVALS_MEMORY = 1 / 64  # weight of the latest step in the average of arriving rows
# at least a part in this many of what waits rides in a step, where prompts are short
BACKLOG_STEPS = 16
QUIET_STEPS = 32  # without a new request, after which no more are expected
BURST_ROWS = 4096  # of prompts that wait: several times what does where requests come one by one
IMPATIENT = 64  # requests up to which a prompt is passed over once; of more, twice in a row
SHORT_PROMPT = 512  # rows: of a longer one no more count, or one alone would delay all that run


class PromptRows:
    """most: rows of prompts in a step. budget: None: as many in each."""

    def __init__(self, most: int, budget: PromptBudget | None) -> None:
        self._most = most
        self.budget = budget
        self._arriving = 0.0  # rows of prompts for each step, a running average
        self._num_quiet = 0  # steps since a request came
        # whose prompts the latest step left waiting, and how many steps in a row have
        self._passed_over: dict[Request, int] = {}

    def note_arrivals(self, admitted: list[Request], are_more: bool) -> None:
        """Count a step before it is made. are_more: requests wait for a place."""
        self._arriving += ARRIVALS_MEMORY * (sum(map(num_left, admitted)) - self._arriving)
        self._num_quiet = 0 if admitted or are_more else self._num_quiet + 1

    def note_left(self, waiting: list[Request]) -> None:
        self._passed_over = {
            request: self._passed_over.get(request, 0) + 1
            for request in waiting
            if num_left(request) > 0
        }

    def hurries(self, waiting: list[Request]) -> bool:
        """Whether steps should be short: no more requests come, or after a burst many prompts wait.

        waiting: those that have a place
        """
        if not waiting:
            return self._num_quiet >= QUIET_STEPS
        return _backlog(waiting) >= BURST_ROWS

    def beside_one_row_each(self, verifying: list[Request], waiting: list[Request]) -> int:
        """Count the rows of prompts that would ride if each request verified one row."""
        if not verifying or not waiting:
            return 0
        one_row_each = work_of(verifying, PLAIN, PLAIN)
        return min(sum(map(num_left, waiting)), self._at_most(one_row_each, waiting))

    def with_ends(self, work: Work) -> Work:
        """Verify as many drafts as pay beside prompts that end."""
        if self.budget is None or not work.shared_rows:
            return work
        num_ends = sum(part.ends_prompt for part in work.parts)
        kept = self.budget.verified(work.shared_rows, len(work.verifying), num_ends)
        return replace(work, shared_rows=kept)

    def fitting(self, work: Work, waiting: list[Request]) -> int:
        """Rows of prompts that ride. One that a step has passed over is due in the next.

        Among many requests, where one that waits is a small part, only one that two steps have
        passed over; but not where rows are shared out, since drafts take what room prompts leave.
        """
        rows = self._at_most(work, waiting)
        if self.budget is None or not work.verifying:
            return rows
        ends = [0, *itertools.accumulate(map(num_left, waiting))]
        left = [min(end, rows) - first for first, end in itertools.pairwise(ends) if first < rows]
        is_patient = len(work.verifying) > IMPATIENT and not work.shared_rows
        most = 2 if is_patient else 1
        due = (i + 1 for i, each in enumerate(waiting) if self._passed_over.get(each, 0) >= most)
        num_due = max(due, default=int(not is_patient))
        num_requests = len(work.verifying)
        return self.budget.fitting(work.num_verify_rows, num_requests, left, num_due, is_patient)

    def _at_most(self, work: Work, waiting: list[Request]) -> int:
        """The most that may ride.

        Where many requests wait, as after a burst, steps are long so that these soon run too: many
        share a step's costs better than few, and drafts pay more beside them than beside prompts.
        """
        most = self._most
        if self.budget is None or not work.verifying:
            return most
        num_keys = sum(request.num_tokens for request in work.verifying)
        verified, start = work.num_verify_rows, waiting[0].num_prefilled
        arriving = max(self._arriving, _backlog(waiting) / BACKLOG_STEPS)
        return min(self.budget.rows(verified, num_keys, start, arriving), most)


def num_left(request: Request) -> int:
    """Tokens of a prompt, or of a resumed request, that are not computed yet."""
    return len(request.context) - bool(request.token_ids) - request.num_prefilled


def _backlog(waiting: list[Request]) -> int:
    """Count the rows of prompts that wait; of a long prompt only the first SHORT_PROMPT."""
    return sum(min(num_left(request), SHORT_PROMPT) for request in waiting)
