"""A line in the log every ten seconds while there is something to say, and an alarm.

The alarm: acceptance over the last 200 rounds or more is under a third of what the draft had over
its first ones.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.requests.metrics import Counter, Gauge, Metric
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineDeadError, EngineSilentError

logger = logging.getLogger("specdec.serve")

SECONDS = 10.0
ROUNDS = 200  # that acceptance is judged by
ALARM = 1 / 3  # of the acceptance at the start
CAUSES = (
    "the text may be of a kind that the draft was not trained on (another language or format, a "
    "higher temperature), or the draft is of another fine-tune: specdec verify TARGET DRAFT says"
)


@dataclass(frozen=True, slots=True)
class Counts:
    """What an engine has done so far."""

    running: int
    waiting: int
    cache: float
    tokens: int  # generated
    rounds: int
    drafted: int
    accepted: int

    @staticmethod
    def of(metrics: Sequence[Metric]) -> "Counts":
        """Read from the engine's metrics."""
        found = {
            each.name.removeprefix("specdec:"): each.value
            for each in metrics
            if isinstance(each, Counter | Gauge)
        }
        return Counts(
            running=int(found["num_requests_running"]),
            waiting=int(found["num_requests_waiting"]),
            cache=found["kv_cache_usage_perc"],
            tokens=int(found["generation_tokens"]),
            rounds=int(found["spec_decode_num_drafts"]),
            drafted=int(found["spec_decode_num_draft_tokens"]),
            accepted=int(found["spec_decode_num_accepted_tokens"]),
        )


class AcceptanceWatch:
    """Compares windows of rounds with the first one."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._is_low = False  # the alarm rings once for each fall
        self._rounds = self._accepted = 0  # at the end of the last window

    def see(self, rounds: int, accepted: int) -> str | None:
        """Counts since the start; the alarm, if the window that ends here calls for it."""
        if rounds - self._rounds < ROUNDS:
            return None
        rate = (accepted - self._accepted) / (rounds - self._rounds)
        self._rounds = rounds
        self._accepted = accepted
        if self._first is None:
            self._first = rate
        was_low = self._is_low
        self._is_low = rate < self._first * ALARM
        if was_low or not self._is_low:
            return None
        fall = f"{rate:.2f} accepted drafts a round, {self._first:.2f} at the start"
        return f"acceptance has fallen: {fall}; {CAUSES}"


class Monitor:
    """Runs beside the server, until it is cancelled or the engine has failed."""

    def __init__(self, llm: AsyncEngine) -> None:
        self._llm = llm
        self._watch = AcceptanceWatch()
        self._before = Counts(0, 0, 0.0, 0, 0, 0, 0)
        self._at = time.monotonic()

    async def run(self) -> None:
        """Look every ten seconds."""
        while True:
            await asyncio.sleep(SECONDS)
            try:
                self.look(Counts.of(await self._llm.get_metrics()))
            except EngineSilentError as error:
                logger.error("%s", error)
            except EngineDeadError:  # the log has its cause
                return

    def look(self, counts: Counts) -> None:
        """Log what has changed since the last look."""
        before = self._before
        tokens = counts.tokens - before.tokens
        seconds = time.monotonic() - self._at
        self._at += seconds
        self._before = counts
        if counts.running or counts.waiting or tokens:
            drafted = counts.drafted - before.drafted
            accepted = counts.accepted - before.accepted
            share = f"{accepted / drafted:.0%} accepted" if drafted else "nothing drafted"
            logger.info(
                "%d running, %d waiting, %.0f tokens/s, %s, cache %.0f%%",
                counts.running,
                counts.waiting,
                tokens / seconds,
                share,
                100 * counts.cache,
            )
        alarm = self._watch.see(counts.rounds, counts.accepted)
        if alarm is not None:
            logger.warning(alarm)
