"""What a step's results give its requests: tokens, logprobs, statistics, and ends."""

import time

from specdec.kernels.best_token import NO_TOKEN
from specdec.requests.metrics import Totals
from specdec.requests.output import Logprob
from specdec.requests.request import Request
from specdec.requests.stats import RoundRecord
from specdec.requests.tokenizer import Tokenizer
from specdec.rounds.logprobs import StepLogprobs
from specdec.rounds.results import StepResult
from specdec.scheduling.work import PromptPart, Work


class Deliveries:
    """Gives requests what was decided; those that have ended get nothing."""

    def __init__(self, tokenizer: Tokenizer, totals: Totals) -> None:
        self._tokenizer = tokenizer
        self._totals = totals

    def give(self, work: Work, result: StepResult) -> list[Request]:
        """Give all requests of a step their part; returns those that have changed."""
        return [*self._verified(work, result), *self._prompts(work, result)]

    def _verified(self, work: Work, result: StepResult) -> list[Request]:
        changed = []
        row = 0
        for b, request in enumerate(work.verifying):
            drafts = result.draft_tokens[b]
            first = row
            row += 1 + len(drafts) if work.shared_rows else work.shape.path_len
            if request.finish is not None:
                continue
            num_accepted = result.num_accepted[b]
            tokens = result.sampled_tokens[b]
            parents = tuple(result.draft_parents[b]) if work.shape.is_wide else ()
            if tokens[0] >= 0:  # else the round brought nothing
                record = RoundRecord(tuple(drafts), num_accepted, tokens[num_accepted], parents)
                request.stats.add_round(record)
                self._totals.verified(record)
            self._append(request, tokens[: num_accepted + 1], result.logprobs, first)
            changed.append(request)
        return changed

    def _prompts(self, work: Work, result: StepResult) -> list[Request]:
        changed = []
        for i, (request, part) in enumerate(zip(work.prompts, work.parts, strict=True)):
            if request.finish is not None:
                continue
            if part.num_logprobs is not None:
                self._append_prompt_logprobs(request, part, result.prompt_logprobs[i])
            if part.samples:
                self._totals.prompt_ended(request)
                tokens = result.sampled_tokens[len(work.verifying) + i][:1]
                num_kept = work.shared_rows or len(work.verifying) * work.shape.path_len
                self._append(request, tokens, result.logprobs, num_kept + i)
                changed.append(request)
        return changed

    def _append(
        self, request: Request, tokens: list[int], logprobs: StepLogprobs | None, first: int
    ) -> None:
        """Give a request its tokens of a step; a marker below 0 ends it.

        first: the row of `logprobs` that belongs to tokens[0]
        """
        end = len(tokens)
        if min(tokens, default=0) < 0:
            end = next(i for i, token in enumerate(tokens) if token < 0)
        num_top = request.params.num_logprobs
        if num_top is not None and logprobs is not None:
            rows = (logprobs.row(first + i, tokens[i], num_top) for i in range(end))
            request.logprobs += map(self._named, rows)
        if end:
            num_before = len(request.token_ids)
            request.append(tokens[:end], time.monotonic())
            self._totals.generated(len(request.token_ids) - num_before)
        if end == len(tokens) or request.finish is not None:
            return
        if tokens[end] == NO_TOKEN:
            request.end_without_candidates()
        else:
            index = len(request.token_ids)
            message = f"the target's logits at position {index} of the output are not finite"
            request.end("error", f"{message} (NaN or infinity)")
            request.has_faulty_blocks = True

    def _append_prompt_logprobs(
        self, request: Request, part: PromptPart, found: StepLogprobs | None
    ) -> None:
        if part.start == 0:
            request.prompt_logprobs = [None]
        following = part.prompt[part.start + 1 : part.start + part.length + 1]
        if found is not None:
            num_top = part.num_logprobs or 0
            rows = (found.row(i, token, num_top) for i, token in enumerate(following))
            request.prompt_logprobs += map(self._named, rows)

    def _named(self, row: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        tokenizer = self._tokenizer
        return {
            token: Logprob(value, rank, tokenizer.decode([token]))
            for token, (value, rank) in row.items()
        }
