"""Requests in, tokens out: the engine steps until every request has reached its end.

A step is a prefill chunk or a round (round.py). This file is the host's side: admission, what a step computes for
whom, and what its tokens mean for each request.
"""

import time
from collections.abc import Sequence

from specdec.block_pool import BlockPool
from specdec.finish import FinishRules
from specdec.output import RequestOutput
from specdec.request import Request
from specdec.runner import Runner
from specdec.sampling import SamplingParams
from specdec.scheduler import Scheduler
from specdec.state import MAX_STOP_IDS, RowStart
from specdec.stats import RequestStats, RoundRecord
from specdec.tokenizer import Detokenizer, Tokenizer


class Engine:
    """eos_token_ids: every id that ends a text by the checkpoint's own word."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        sizes = runner.sizes
        self.runner, self.tokenizer = runner, tokenizer
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self.scheduler = Scheduler(
            BlockPool(sizes.num_kv_blocks), sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len
        )
        self._num_requests = 0

    def add_requests(self, batch: Sequence[tuple[str | Sequence[int], SamplingParams]]) -> list[Request]:
        """Check and queue requests. ValueError says what is wrong with one; none is queued then."""
        requests = [self._request(prompt, params) for prompt, params in batch]
        for request in requests:
            self.scheduler.add(request)
        return requests

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check_prompt(token_ids, params)
        request = Request(
            request_id=str(self._num_requests),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            rules=self._rules(len(token_ids), params),
            detokenizer=Detokenizer(self.tokenizer, params.skip_special_tokens),
            stats=RequestStats(num_prompt_tokens=len(token_ids), arrival_time=time.monotonic()),
        )
        self._check_fits(request)
        self._num_requests += 1
        return request

    def step(self) -> list[RequestOutput]:
        """Run one chunk or one round; returns the outputs of the requests that ended in it."""
        K = self.runner.sizes.num_speculative_tokens
        for request in self.scheduler.admit(K):
            self.runner.start(request.row, self._row_start(request))
        return self._run_chunk() if self.scheduler.prefilling else self._run_round()

    def _row_start(self, request: Request) -> RowStart:
        rules = request.rules
        return RowStart(
            blocks=request.blocks,
            num_draft_tokens=self.runner.sizes.num_speculative_tokens,
            min_position=len(request.prompt_token_ids) + rules.min_tokens,
            stop_ids=sorted({*rules.eos_token_ids, *rules.stop_token_ids}) if rules.min_tokens else (),
        )

    def _run_chunk(self) -> list[RequestOutput]:
        chunk = self.scheduler.next_chunk()
        self.runner.run_chunk([part for _, part in chunk])
        sampled = self.runner.read_sampled(len(chunk))
        for (request, part), token in zip(chunk, sampled, strict=True):
            self.scheduler.prefilled(request, part.length)
            if part.ends_prompt:
                request.append([token], time.monotonic())
        return self._finished([request for request, _ in chunk])

    def _run_round(self) -> list[RequestOutput]:
        requests = list(self.scheduler.running)
        bound = max(request.num_tokens for request in requests) - 1
        self.runner.run_round([request.row for request in requests], bound)
        result, now = self.runner.read(len(requests)), time.monotonic()
        for b, request in enumerate(requests):
            drafted = self._num_drafted(request)
            num_accepted, tokens = result.num_accepted[b], result.sampled_tokens[b]
            request.record_round(
                RoundRecord(tuple(result.draft_tokens[b][:drafted]), num_accepted, tokens[num_accepted])
            )
            request.append(tokens[: num_accepted + 1], now)
        return self._finished(requests)

    def _num_drafted(self, request: Request) -> int:
        """Drafts of this round: the rows behind the first that lie within the context."""
        sizes = self.runner.sizes
        return min(sizes.num_speculative_tokens, sizes.max_model_len - request.num_tokens)

    def _finished(self, requests: Sequence[Request]) -> list[RequestOutput]:
        ended = [request for request in requests if request.finish is not None]
        for request in ended:
            self.scheduler.release(request)
        return [request.output() for request in ended]

    def _rules(self, num_prompt_tokens: int, params: SamplingParams) -> FinishRules:
        room = self.runner.sizes.max_model_len - num_prompt_tokens
        return FinishRules(
            max_tokens=min(params.max_tokens, room),
            min_tokens=params.min_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids),
            stop_strings=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    def _check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        limit = self.runner.sizes.max_model_len
        if not token_ids:
            raise ValueError("empty prompt: give at least one token")
        if params.min_tokens and len({*self.eos_token_ids, *params.stop_token_ids}) > MAX_STOP_IDS:
            raise ValueError(f"min_tokens with more than {MAX_STOP_IDS} EOS and stop_token_ids: give fewer of them")
        for token in (*token_ids, *params.stop_token_ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the target's vocabulary (0 to {self.vocab_size - 1})")
        if len(token_ids) >= limit:
            raise ValueError(
                f"prompt of {len(token_ids)} tokens leaves no room for an answer in max_model_len={limit}: "
                f"shorten it to at most {limit - 1} tokens, or raise max_model_len"
            )

    def _check_fits(self, request: Request) -> None:
        need = self.scheduler.blocks_needed(
            len(request.prompt_token_ids), request.rules.max_tokens, self.runner.sizes.num_speculative_tokens
        )
        have = self.scheduler.pool.num_blocks
        if need > have:
            raise ValueError(
                f"the cache is too small for this request: prompt of {len(request.prompt_token_ids)} tokens and "
                f"max_tokens={request.rules.max_tokens} need {need} blocks of 64 tokens, num_kv_blocks={have}: "
                f"raise num_kv_blocks, or lower max_tokens"
            )
