"""Requests in, tokens out: the engine steps until every request has reached its end.

A step is a prefill chunk or a round (round.py). This file is the host's side: admission, what a step computes for
whom, and what its tokens mean for each request.
"""

import random
import time
from collections.abc import Sequence

from specdec.block_pool import BlockPool
from specdec.chunk_inputs import PromptPart
from specdec.finish import FinishRules
from specdec.kernels.choose_token import NO_TOKEN
from specdec.logprobs import Logprob, StepLogprobs
from specdec.needs import Needs
from specdec.output import RequestOutput
from specdec.request import Request
from specdec.runner import Runner
from specdec.sampling import SamplingParams
from specdec.sampling_rows import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, SamplingStart
from specdec.scheduler import Scheduler
from specdec.state import MAX_STOP_IDS, RowStart
from specdec.stats import RequestStats, RoundRecord
from specdec.tokenizer import Detokenizer, Tokenizer


class Engine:
    """eos_token_ids: every id that ends a text by the checkpoint's own word. seed: of the seeds that are drawn."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> None:
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        sizes = runner.sizes
        self.runner, self.tokenizer = runner, tokenizer
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self.scheduler = Scheduler(
            BlockPool(sizes.num_kv_blocks), sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len
        )
        self._num_requests = 0

    def add_requests(self, batch: Sequence[tuple[str | Sequence[int], SamplingParams]]) -> list[Request]:
        """Check and queue requests. ValueError says what is wrong with one; none is queued then.

        Returns the first sample of each; it knows the others.
        """
        requests = [self._samples(prompt, params) for prompt, params in batch]
        for samples in requests:
            for sample in samples:
                self.scheduler.add(sample)
        return [samples[0] for samples in requests]

    def _samples(self, prompt: str | Sequence[int], params: SamplingParams) -> list[Request]:
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        samples = [self._request(prompt, params, seed, index) for index in range(params.n)]
        self._num_requests += 1
        for sample in samples:
            sample.samples = samples
        return samples

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, seed: int, index: int) -> Request:
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
            sampling=self._sampling(token_ids, params, (seed + index) % (1 << 64)),
            index=index,
        )
        self._check_fits(request)
        return request

    def _sampling(self, token_ids: Sequence[int], params: SamplingParams, seed: int) -> SamplingStart:
        return SamplingStart(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params),
            prompt=token_ids,
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Ids of each bad word as it stands at the start of a text and, where it is one more token, behind a space."""
        found: list[list[int]] = []
        for word in params.bad_words:
            plain, spaced = (self.tokenizer.encode_word(prefix + word.lstrip()) for prefix in ("", " "))
            found.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        if len(found) > MAX_BAD_WORDS or any(len(ids) > MAX_BAD_WORD_LENGTH for ids in found):
            raise ValueError(
                f"bad_words={list(params.bad_words)!r}: {len(found)} sequences of at most "
                f"{max(map(len, found))} tokens; at most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_LENGTH} are possible"
            )
        return found

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
            sampling=request.sampling,
        )

    def _run_chunk(self) -> list[RequestOutput]:
        chunk = self.scheduler.next_chunk()
        needs = Needs.of_all(request.params.needs for request, part in chunk if part.ends_prompt)
        self.runner.run_chunk([part for _, part in chunk], needs)
        result = self.runner.read(len(chunk))
        self._take_prompt_logprobs(chunk)
        for b, (request, part) in enumerate(chunk):
            self.scheduler.prefilled(request, part.length)
            if part.ends_prompt:
                self._append(request, result.sampled_tokens[b][:1], result.logprobs, b)
        return self._finished([request for request, _ in chunk])

    def _run_round(self) -> list[RequestOutput]:
        requests = list(self.scheduler.running)
        bound = max(request.num_tokens for request in requests) - 1
        needs = Needs.of_all(request.params.needs for request in requests)
        self.runner.run_round([request.row for request in requests], bound, needs)
        result = self.runner.read(len(requests))
        for b, request in enumerate(requests):
            drafted = self._num_drafted(request)
            num_accepted, tokens = result.num_accepted[b], result.sampled_tokens[b]
            request.record_round(
                RoundRecord(tuple(result.draft_tokens[b][:drafted]), num_accepted, tokens[num_accepted])
            )
            self._append(request, tokens[: num_accepted + 1], result.logprobs, b * len(tokens))
        return self._finished(requests)

    def _append(self, request: Request, tokens: list[int], logprobs: StepLogprobs | None, first: int) -> None:
        """Give a request the tokens of a step, whose logprobs begin in row `first`; -1: no token was left."""
        end = tokens.index(NO_TOKEN) if NO_TOKEN in tokens else len(tokens)
        num_top = request.params.logprobs
        if num_top is not None and logprobs is not None:
            request.logprobs += [self._named(logprobs.row(first + i, tokens[i], num_top)) for i in range(end)]
        request.append(tokens[:end], time.monotonic())
        if end < len(tokens) and request.finish is None:
            request.fail()

    def _take_prompt_logprobs(self, chunk: Sequence[tuple[Request, PromptPart]]) -> None:
        if all(part.num_logprobs is None for _, part in chunk):
            return
        for (request, part), found in zip(chunk, self.runner.read_prompt_logprobs(), strict=True):
            if part.num_logprobs is None:
                continue
            if part.start == 0:
                request.prompt_logprobs = [None]
            following = part.prompt[part.start + 1 : part.start + part.length + 1]
            if found is not None:
                rows = (found.row(i, token, part.num_logprobs) for i, token in enumerate(following))
                request.prompt_logprobs += [self._named(row) for row in rows]

    def _named(self, row: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        return {token: Logprob(value, rank, self.tokenizer.decode([token])) for token, (value, rank) in row.items()}

    def _num_drafted(self, request: Request) -> int:
        """Drafts of this round: the rows behind the first that lie within the context."""
        sizes = self.runner.sizes
        return min(sizes.num_speculative_tokens, sizes.max_model_len - request.num_tokens)

    def _finished(self, requests: Sequence[Request]) -> list[RequestOutput]:
        ended = [request for request in requests if request.finish is not None]
        for request in ended:
            self.scheduler.release(request)
        return [request.output() for request in ended if request.is_finished]

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
        named = [("", token_ids), ("", params.stop_token_ids), ("logit_bias: ", params.logit_bias)]
        named += [("allowed_token_ids: ", params.allowed_token_ids or ())]
        for name, token in ((name, token) for name, tokens in named for token in tokens):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{name}token id {token} is outside the target's vocabulary (0 to {self.vocab_size - 1})"
                )
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
