"""One step as the host knows it: sizes only. Everything that depends on accepted counts stays on the device."""

from dataclasses import dataclass

from graphs.dispatch import Dispatch
from specdec.requests.needs import GREEDY, Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How each pass of a step runs, and over which sizes: a graph's own, or the true ones. None: it does not run."""

    target: Dispatch
    draft_prefill: Dispatch | None = None
    draft_decode: Dispatch | None = None

    @property
    def num_reqs(self) -> int:
        """Batch slots of the widest pass; a graph for any number of them needs none beyond the real ones."""
        return max(how.descriptor.num_reqs or 0 for how in self._all())

    @property
    def num_tokens(self) -> int:
        """Rows of the longest pass."""
        return max(how.descriptor.num_tokens for how in self._all())

    def _all(self) -> list[Dispatch]:
        return [how for how in (self.target, self.draft_prefill, self.draft_decode) if how is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A prefill chunk (ragged `query_lens`) or a round (every request has `query_len` rows)."""

    num_reqs: int  # real batch slots
    num_tokens: int  # real rows
    query_len: int | None  # rows per request of a round, None in a chunk
    query_lens: tuple[int, ...]  # rows of each batch slot
    max_seq_len: int  # a bound on positions + 1 over all rows
    num_sampled: int  # batch slots that sample: all of a round, those whose prompt ends in a chunk
    passes: Passes
    needs: Needs = GREEDY  # of all its requests together
    is_decided: bool = False  # p/q says how many drafts hold

    @property
    def has_drafts(self) -> bool:
        """Whether the draft has anything to do."""
        return self.passes.draft_prefill is not None

    @property
    def num_padded_reqs(self) -> int:
        """Batch slots that `fill` writes: each pass reads the first of them, up to its own size."""
        return max(self.num_reqs, self.passes.num_reqs)

    @property
    def num_padded_tokens(self) -> int:
        """Rows that `fill` writes."""
        return max(self.num_tokens, self.passes.num_tokens, self.num_padded_reqs * (self.query_len or 0))
