"""One step as the host knows it: sizes only. Everything that depends on accepted counts stays on the device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A prefill chunk (ragged `query_lens`) or a round (every request has `query_len` rows)."""

    num_reqs: int  # real batch slots; the buffers may be padded beyond
    num_tokens: int  # real rows
    query_len: int | None  # rows per request of a round, None in a chunk
    query_lens: tuple[int, ...] = ()  # rows of each batch slot of a chunk
    max_seq_len: int  # a bound on positions + 1 over all rows
    num_sampled: int  # batch slots that sample: all of a round, those whose prompt ends in a chunk
