"""Which rows of prompts ride in a step, beside the requests that verify.

As many as keep the step within a multiple of its time without them (costs.py), more where many
wait, and all that fit while nothing runs.
"""

from specdec.requests.request import Request
from specdec.scheduling.costs import MEMORY, PromptBudget

BACKLOG_STEPS = 16  # where prompts are short, all that wait have run after so many steps
SHORT_PROMPT = 512  # rows: of a longer one no more count, or one alone would delay all that run


class PromptRows:
    """most: rows of prompts in a step. budget: None: as many in each."""

    def __init__(self, most: int, budget: PromptBudget | None) -> None:
        self._most = most
        self.budget = budget
        self._arriving = 0.0  # rows of prompts for each step, a running average

    def note_arrivals(self, admitted: list[Request]) -> None:
        """Count a step before it is made."""
        self._arriving += (sum(map(num_left, admitted)) - self._arriving) / MEMORY

    def fitting(self, num_rows: int, verifying: list[Request], waiting: list[Request]) -> int:
        """Bound the rows of prompts that ride with num_rows rows of those that verify.

        Where many requests wait, as after a burst, steps are long so that these soon run too: many
        share a step's costs better than few, and drafts pay more beside them than beside prompts.
        """
        if not waiting:
            return 0
        wanted = sum(map(num_left, waiting))
        if self.budget is None or not verifying:
            return min(wanted, self._most)
        num_keys = sum(request.num_tokens for request in verifying)
        backlog = sum(min(num_left(request), SHORT_PROMPT) for request in waiting)
        arriving = max(self._arriving, backlog / BACKLOG_STEPS)
        start, most = waiting[0].num_prefilled, min(wanted, self._most)
        return self.budget.rows(num_rows, num_keys, start, arriving, most)


def num_left(request: Request) -> int:
    """Tokens of a prompt, or of a resumed request, that are not computed yet."""
    return len(request.context) - bool(request.token_ids) - request.num_prefilled
