"""The loop of `specdec bench --suite loop` without a device: the scheduler decides, costs are time.

Requests run at all times; when one ends, the next begins. Each step is scheduled before the results
of the one before it are read, as with async_scheduling and many requests. Drafts hold by chance.
"""

import itertools
import random
import statistics
from collections import deque
from dataclasses import dataclass

from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import Detokenizer
from specdec.scheduling.block_pool import BlockPool
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_costs import PromptBudget, StepCosts
from specdec.scheduling.work import Work
from specdec.sizes import EngineSizes

K = 3
NUM_TOKENS = 160
PROMPTS = 25, 160
# about those of an 8B pair on an H200
COSTS = StepCosts(
    rounds=(
        *((16, 4.75), (32, 4.8), (64, 5.1), (128, 5.9), (160, 6.2)),
        *((192, 6.7), (256, 8.0), (320, 9.1), (384, 9.8), (512, 11.8)),
    ),
    mixed=(
        *((64, 5.7), (128, 6.5), (160, 6.9), (192, 7.3), (256, 8.6), (320, 9.8), (384, 10.5)),
        *((512, 12.6), (640, 15.6), (768, 18.2), (896, 20.8), (1024, 23.2), (2048, 44.0)),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """first_tokens: times to the first token, in mean steps. gaps: between deliveries, in ms.

    first_steps: steps whose results were awaited for the first token
    """

    tokens_per_second: float
    first_tokens: list[float]
    first_steps: list[int]
    gaps: list[float]


class LoopWorld:
    """held: the chance of a draft whose predecessors hold."""

    def __init__(self, num_requests: int, budget: PromptBudget, held: float = 0.72) -> None:
        sizes = EngineSizes(
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            max_model_len=1024,
            num_kv_blocks=8 * num_requests,
            num_speculative_tokens=K,
        )
        self._scheduler = Scheduler(BlockPool(sizes.num_kv_blocks), sizes, False, budget)
        self._chance = random.Random(0)
        self._held = held
        self._numbers = itertools.count()
        self._began: dict[Request, tuple[float, int]] = {}  # when, and after how many steps
        self._delivered: dict[Request, float] = {}
        self._first_tokens: list[float] = []
        self._first_steps: list[int] = []
        self._num_taken = 0  # steps
        self._gaps: list[float] = []
        self._num_tokens = 0
        for _ in range(num_requests):  # they end one after another
            self._begin(0.0, self._chance.randint(1, NUM_TOKENS))

    def run(self, num_steps: int) -> Figures:
        """After a quarter as many steps, which do not count."""
        in_flight: deque[tuple[Work, float]] = deque()
        end = began = 0.0
        steps: list[float] = []
        for number in range(-num_steps // 4, num_steps):
            work = self._scheduler.schedule().work
            assert work is not None, "nothing to do"
            steps.append(_ms(work))
            end += steps[-1]
            in_flight.append((work, end))
            if len(in_flight) > 1:
                self._take(*in_flight.popleft())
            if number == 0:
                began, self._num_tokens = end, 0
                steps, self._first_tokens, self._first_steps, self._gaps = [], [], [], []
        mean = statistics.mean(steps)
        first_tokens = [ms / mean for ms in self._first_tokens]
        return Figures(
            tokens_per_second=1e3 * self._num_tokens / (end - began),
            first_tokens=first_tokens,
            first_steps=self._first_steps,
            gaps=self._gaps,
        )

    def _begin(self, now: float, num_tokens: int = NUM_TOKENS) -> None:
        number = next(self._numbers)
        request = Request(
            request_id=str(number),
            prompt=None,
            prompt_token_ids=[0] * self._chance.randint(*PROMPTS),
            params=SamplingParams(temperature=0.0),
            rules=FinishRules(max_tokens=num_tokens),
            detokenizer=Detokenizer(None),
            stats=RequestStats(),
            priority=0,
            number=number,
            num_speculative_tokens=K,
        )
        self._began[request] = now, self._num_taken
        self._scheduler.add(request)

    def _take(self, work: Work, now: float) -> None:
        """A step's results."""
        self._num_taken += 1
        counts = [1 + self._num_held() for _ in work.verifying]
        counts += [int(part.samples) for part in work.parts]
        ended = 0
        for request, count in zip(work.requests, counts, strict=True):
            if count == 0 or request.finish is not None:
                continue
            if request.token_ids:
                self._gaps.append(now - self._delivered[request])
            else:
                began, num_taken = self._began[request]
                self._first_tokens.append(now - began)
                self._first_steps.append(self._num_taken - num_taken)
            self._delivered[request] = now
            num_before = len(request.token_ids)
            request.append([7] * count, 0.0)
            self._num_tokens += len(request.token_ids) - num_before
            ended += request.finish is not None
        self._scheduler.finish_step(work)
        for _ in range(ended):
            self._begin(now)

    def _num_held(self) -> int:
        draws = (self._chance.random() < self._held for _ in range(K))
        return sum(itertools.takewhile(bool, draws))


def _ms(work: Work) -> float:
    num_prompt_rows = sum(part.length for part in work.parts)
    if num_prompt_rows:
        return COSTS.mixed_ms(work.num_verify_rows + num_prompt_rows, 0, 0)
    return COSTS.round_ms(work.num_verify_rows, 0)
