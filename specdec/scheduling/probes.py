"""When a shape that was not chosen is drafted, to see whether it has become better."""

PROBE_EVERY = 64  # rounds, and twice as many while nothing pays
LEAST_PROBED = 4  # drafts: fewer requests probe in several rounds


class Probes:
    """is_live: whether the drafts of the round to plan are a probe.

    num_probes: rounds whose drafts were one. num_begun: probes, each of several rounds
    """

    def __init__(self) -> None:
        self._wait = PROBE_EVERY
        self._num_since = 0
        self.is_live = False
        self.num_probes = self.num_begun = 0

    def is_due(self, pays: bool, num_drafting: int) -> bool:
        """Whether the next drafts are a probe. pays: another shape is better than plain rounds."""
        if pays:
            self._wait = PROBE_EVERY
        self._num_since += 1
        self.is_live = self._num_since >= self._wait
        self.num_probes += self.is_live
        self.num_begun += self._num_since == self._wait
        if self._num_since >= self._wait + LEAST_PROBED // min(num_drafting, LEAST_PROBED) - 1:
            self._num_since = 0
            if not pays:
                self._wait = 2 * PROBE_EVERY
        return self.is_live
