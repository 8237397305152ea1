"""Progress of a list of requests on a screen: done, tokens per second, acceptance length."""

import time
from collections.abc import Iterable, Sequence

from specdec.requests.request import Request
from weights.bars import bar


class Progress:
    """Counts the requests that ended. is_shown: draw a bar, if there is a screen."""

    def __init__(self, requests: Sequence[Request], is_shown: bool) -> None:
        self.requests = requests
        self._running = {request.request_id for request in requests}
        self._num_tokens = self._num_rounds = self._num_accepted = 0
        self._start = time.monotonic()
        self._bar = bar(total=len(requests), desc="generating", unit="request", is_wanted=is_shown)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    @property
    def is_complete(self) -> bool:
        return not self._running

    def update(self, changed: Iterable[Request], is_broken_off: bool = False) -> None:
        """Count the requests that a step ended; requests of other callers do not count.

        An abort is not shown as an end, nor is the end by a step that was interrupted.
        """
        for request in changed:
            if request.is_finished and request.request_id in self._running:
                self._running.remove(request.request_id)
                samples = request.all_samples
                is_aborted = any(each.finish and each.finish.reason == "abort" for each in samples)
                if not is_broken_off and not is_aborted:
                    self._count(samples)
                    self._bar.update()

    def _count(self, samples: Sequence[Request]) -> None:
        self._num_tokens += sum(sample.stats.num_generated_tokens for sample in samples)
        self._num_rounds += sum(sample.stats.num_rounds for sample in samples)
        self._num_accepted += sum(sample.stats.num_accepted_tokens for sample in samples)
        seconds = max(time.monotonic() - self._start, 1e-9)
        figures = {"tokens/s": f"{self._num_tokens / seconds:.0f}"}
        if self._num_accepted:
            figures["acceptance length"] = f"{1 + self._num_accepted / self._num_rounds:.2f}"
        self._bar.set_postfix(figures, refresh=False)
