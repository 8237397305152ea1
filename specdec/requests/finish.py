"""Where a request ends: one pure function over the tokens of a step.

Tokens are scanned in order and the earliest position wins; at one position a stop string goes
before a stop token or EOS, and both before the length. Everything after that position is dropped.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRules:
    """A request's limits: no eos_token_ids with ignore_eos, max_tokens within max_model_len."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()
    stop_strings: Sequence[str] = ()
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """stop_reason: the string or token id of reason "stop", None for EOS and "length"."""

    reason: str
    num_tokens: int  # generated tokens that are kept
    num_text_tokens: int  # those whose text is kept: a stop token's is not
    num_chars: int | None = None  # where a stop string cuts the text
    stop_reason: str | int | None = None


def find_finish(
    rules: FinishRules, tokens: Sequence[int], text: str, ends: Sequence[int], num_before: int
) -> Finish | None:
    """Find the end among tokens[num_before:].

    tokens: all generated tokens so far, and their text. ends[i]: characters of the text that
    tokens[: i + 1] completed.
    """
    for index in range(num_before, len(tokens)):
        count, token = index + 1, tokens[index]
        if count > rules.min_tokens:
            cut = _stop_string(rules, text, ends, index) if rules.stop_strings else None
            if cut is not None:
                return Finish("stop", count, count, *cut)
            is_eos = token in rules.eos_token_ids
            if is_eos or token in rules.stop_token_ids:
                num_text_tokens = count if rules.include_stop_str_in_output else index
                return Finish("stop", count, num_text_tokens, None, None if is_eos else token)
        if count >= rules.max_tokens:
            return Finish("length", count, count)
    return None


def num_certain_chars(rules: FinishRules, text: str) -> int:
    """Count the characters of a running request's text that no stop string can still remove."""
    if rules.include_stop_str_in_output:
        return len(text)
    longest = max((len(stop) for stop in rules.stop_strings), default=1)
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        tail = text[start:]
        if any(stop.startswith(tail) and stop != tail for stop in rules.stop_strings):
            return start
    return len(text)


def _stop_string(
    rules: FinishRules, text: str, ends: Sequence[int], index: int
) -> tuple[int, str] | None:
    """Find where a stop string that this token completed cuts: the earliest, then longest."""
    before = ends[index - 1] if index else 0
    found = []
    for stop in rules.stop_strings:
        start = text.find(stop, max(before - len(stop) + 1, 0), ends[index])
        if start >= 0:
            found.append((start, -len(stop), stop))
    if not found:
        return None
    start, _, stop = min(found)
    return start + (len(stop) if rules.include_stop_str_in_output else 0), stop
