"""Grammars compiled by llguidance, and matchers that say which tokens may follow.

A grammar comes from a request, so its size is bounded, and so is the work of compiling it and of
every mask: the limits count operations, which bounds most masks; mask_threads.py bounds the rest by
time. The compiler recurses over the rules of a grammar, thousands of them in a hostile one, so it
runs on a stack that holds the longest grammar. Nothing is fetched: a $ref to another document is an
error.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.guided.mask_threads import MaskThreads, most_threads
from specdec.requests.guide import Part
from specdec.requests.json_schemas import prepared_text
from specdec.requests.structured_outputs import JSON_SPACE
from specdec.requests.tokenizer import Tokenizer

# the library would capture a stack for each of a grammar's rules that an error passes through:
# with RUST_BACKTRACE=1, 4,000 rules took 75 s
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")

MAX_CHARS = 1 << 17  # of a grammar
REPEAT_SECONDS = 0.005  # of a processor, for compiling a grammar again for further threads
SLOW_SECONDS = 0.0003  # of a processor, for a mask: a grammar's walks that take more are shared
REHEARSAL_SECONDS = 0.005  # of a processor, for the first masks of a grammar
REHEARSAL_TEXTS, REHEARSAL_TOKENS = 8, 64
STACK_BYTES = 1 << 29  # reserved, not taken, while a grammar is compiled
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
FULL = "too many states"  # of a lexer, in the library's error
_of_schema = partial(
    LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": JSON_SPACE}
)
_stack_size = threading.Lock()  # of threads to come, one number for the process
# the library's words name an option that no request has
OVERLAP = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf"
)
ADVICE = (
    "alternatives of oneOf may match the same value: write anyOf, or alternatives that cannot, as "
    "other types, or objects that each require a property with a const text of their own"
)
FORMATS: dict[str, Callable[[str], str]] = {
    "json": lambda text: _of_schema(prepared_text(text)),
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


class Grammars:
    """vocab_size: the target's; ids beyond the tokenizer's are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ValueError("structured_outputs needs a target with an EOS token, to end the text")
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = LLTokenizer(
            tokenizer.as_json(), n_vocab=vocab_size, eos_token=sorted(self._eos_token_ids)
        )
        self._num_bytes = 4 * -(-self._tokenizer.vocab_size // 32)
        self._alive: WeakSet[Compiled] = WeakSet()

    @property
    def num_alive(self) -> int:
        """Count grammars that are kept, in use, or have a mask without end being computed."""
        return len(self._alive)

    def compile(self, kind: str, text: str) -> "Matcher":
        """Compile a matcher before the first token. ValueError has the compiler's message."""
        if len(text) > MAX_CHARS:
            size = f"{len(text):,} characters of {kind}"
            raise ValueError(f"structured_outputs: {size}, at most {MAX_CHARS:,} are allowed")
        found = self._compiled(kind, text)
        if found.num_locks == 1:  # it is slow to compile, or there is one processor
            return Matcher(found, self._eos_token_ids)
        rehearsal = Rehearsal(Matcher(found, self._eos_token_ids))
        MaskThreads().masks([(rehearsal, ())])
        if rehearsal.is_abandoned:  # with its locks; whether a request comes that far is open
            found = self._compiled(kind, text)
        return Matcher(found, self._eos_token_ids)

    def _compiled(self, kind: str, text: str) -> "Compiled":
        try:
            starts = _on_a_large_stack(lambda: self._starts(kind, text))
        except ValueError as error:
            raise ValueError(f"structured_outputs: {kind}: {error}") from error
        if starts[0].is_error():
            words = starts[0].get_error().replace(OVERLAP, ADVICE)
            raise ValueError(f"structured_outputs: {kind}: {words}")

        def again() -> LLMatcher:
            return _on_a_large_stack(lambda: [self._matcher(kind, text)])[0]

        found = Compiled(starts, self._num_bytes, again)
        self._alive.add(found)
        return found

    def _starts(self, kind: str, text: str) -> list[LLMatcher]:
        """Compile a matcher for each thread, if that is quick."""
        most = most_threads()
        end = time.thread_time() + REPEAT_SECONDS
        starts = [self._matcher(kind, text)]
        while len(starts) < most and time.thread_time() < end and not starts[0].is_error():
            starts.append(self._matcher(kind, text))
        return starts

    def _matcher(self, kind: str, text: str) -> LLMatcher:
        grammar = FORMATS[kind](text)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)


class Compiled:
    """A grammar. Its matchers copy one of `starts`, and the copies of one share a lock and a lexer.

    again: compiles another start, with an empty lexer. num_bytes: of a mask.
    reason: why it was given up; empty if it was not. num_slow_masks: so far.
    walk_seconds: of the latest walk of any matcher.

    With 128,000 tokens each mask within a string of bounded length takes about a millisecond.
    """

    def __init__(
        self, starts: list[LLMatcher], num_bytes: int, again: Callable[[], LLMatcher]
    ) -> None:
        self.num_bytes = num_bytes
        self.reason = ""
        self.num_slow_masks = 0
        self.walk_seconds = 0.0
        self.num_locks = len(starts)
        self._starts = starts
        self._again = again
        self._replacing = threading.Lock()
        self._users: list[WeakSet[Matcher]] = [WeakSet() for _ in starts]

    @property
    def is_slow(self) -> bool:
        """Whether several masks were slow: a single one may be the first of a process."""
        return self.num_slow_masks > 1

    def start_of(self, matcher: "Matcher") -> tuple[int, LLMatcher]:
        """Pick the start that the fewest other matchers have; return its number, too."""
        number, users = min(enumerate(self._users), key=lambda each: len(each[1]))
        users.add(matcher)
        return number, self._starts[number]

    def replaced(self, number: int, full: LLMatcher) -> tuple[LLMatcher, bool]:
        """Replace the start of this number if it is `full`; return it, and whether it is new."""
        with self._replacing:
            is_first = self._starts[number] is full
            if is_first:
                self._starts[number] = self._again()
            return self._starts[number], is_first


class Matcher:
    """A Guide: stands after the tokens that a request has generated.

    tokens: generated so far; if there are any, the library's matcher is made by the first walk, in
        its thread
    walk_seconds: of the latest walk, of a processor; before the first, of another one's
    """

    def __init__(
        self, compiled: Compiled, eos_token_ids: frozenset[int], tokens: Sequence[int] = ()
    ) -> None:
        self._compiled = compiled
        self._number, self._start = compiled.start_of(self)
        self._made = None if tokens else self._start.deep_copy()
        self._tokens = list(tokens)
        self._ahead: Sequence[int] = ()  # drafts before the first row of a part
        self._others: list[Matcher] = []  # at the same position, for parts of a slow walk
        self._eos_token_ids = eos_token_ids
        self.walk_seconds = compiled.walk_seconds
        self._error = ""
        self._rows = np.zeros((0, compiled.num_bytes), np.uint8)
        self._pointer = 0

    @property
    def lock(self) -> object:
        """What copies of one start share in llguidance."""
        return self._start

    @property
    def _matcher(self) -> LLMatcher:
        if self._made is None:
            self._made = self._start.deep_copy()
            self._made.consume_tokens([*self._tokens, *self._ahead])
        return self._made

    def copy(self) -> "Matcher":
        """Copy the matcher at its position."""
        return Matcher(self._compiled, self._eos_token_ids, self._tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, which its masks have allowed; EOS ends the text."""
        for token in tokens:
            if token in self._eos_token_ids or self._compiled.reason:
                return
            if self._made is not None:
                self._made.consume_token(token)  # if it fails, no token may follow
            self._tokens.append(token)
            for other in self._others:
                other.advance([token])

    def parts(self, first: int, end: int) -> list[Part]:
        """Split a walk into rows, if the grammar is slow, on as many threads as it has locks."""
        count = min(end - first, self._compiled.num_locks) if self._compiled.is_slow else 1
        while len(self._others) < count - 1:
            self._others.append(self.copy())
        firsts = [first + number * (end - first) // count for number in range(count)]
        matchers = zip(firsts, [self, *self._others], strict=False)
        return [Part(row, LaterRows(row, each) if row else each) for row, each in matchers]

    @property
    def is_given_up(self) -> bool:
        return bool(self._compiled.reason)

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """List the tokens that may follow: here, and after each draft up to the first that may not.

        Where a limit is met no token may follow, and `error` says which.
        """
        if not self._eos_token_ids.isdisjoint(drafts):
            drafts = list(takewhile(lambda token: token not in self._eos_token_ids, drafts))
        found = None if self._compiled.reason else self._masks_at_once(drafts)
        has_own_lexer = False
        while found is None and self._is_full and not has_own_lexer:
            self._start, has_own_lexer = self._compiled.replaced(self._number, self._start)
            self._made = None
            found = self._masks_at_once(drafts)
        if self._compiled.reason:  # further masks are not needed
            return [bytes(self._compiled.num_bytes)]
        return self._masks_one_by_one(drafts) if found is None else found

    def masks_from(self, first: int, drafts: Sequence[int]) -> list[bytes]:
        """List `masks` from number `first` on; none if a draft before it may not follow."""
        if first == 0:
            return self.masks(drafts)
        ahead = list(drafts[:first])
        if self._is_full:
            return self.masks(drafts)[first:]
        if self._compiled.reason or self._matcher.is_error():
            return [bytes(self._compiled.num_bytes)]
        if not self._eos_token_ids.isdisjoint(ahead):
            return []
        num_taken = self._matcher.try_consume_tokens(ahead)
        if self._matcher.is_error():  # a limit is met before row `first`, or there
            self._go_back(0)
            return self.masks(drafts)[first:]
        found = []
        if num_taken >= first - 1:
            self._ahead = ahead[:num_taken]
            found = self.masks(drafts[num_taken:])[first - num_taken :]
            self._ahead = ()
        self._go_back(num_taken)
        return found

    @property
    def _is_full(self) -> bool:
        """Whether the texts of all copies of its start have filled their lexer together."""
        return not self._compiled.reason and FULL in self._matcher.get_error()

    def _masks_at_once(self, drafts: Sequence[int]) -> list[bytes] | None:
        """Compute masks in one call, during which other threads run; None if a limit is met."""
        if self._matcher.is_error():
            return None
        num_bytes = self._compiled.num_bytes
        rows, pointer = self._room(1 + len(drafts))
        rows.fill(0)  # the call may end before the last
        walk: Any = self._matcher  # whose stub leaves a method out
        began = time.thread_time()
        if drafts:
            walk.unsafe_compute_mask_ptr_with_draft_token(pointer, num_bytes, drafts)
        else:
            walk.unsafe_compute_mask_ptr(pointer, num_bytes)
        seconds = time.thread_time() - began
        self.walk_seconds = self._compiled.walk_seconds = seconds
        if self._matcher.is_error():
            return None
        masks = [rows[0].tobytes()]
        for row, draft in zip(rows[1:], drafts, strict=False):
            if not _is_allowed(masks[-1], draft):
                break
            masks.append(row.tobytes())
        if seconds > SLOW_SECONDS * len(masks):
            self._compiled.num_slow_masks += len(masks)
        return masks

    def _room(self, num_rows: int) -> tuple[np.ndarray, int]:
        """Give room for masks, uint8 [num_rows or more, num_bytes], and its address."""
        if len(self._rows) < num_rows:
            self._rows = np.zeros((num_rows, self._compiled.num_bytes), np.uint8)
            self._pointer = self._rows.ctypes.data
        return self._rows, self._pointer

    def _masks_one_by_one(self, drafts: Sequence[int]) -> list[bytes]:
        """Compute masks up to the limit that is met."""
        self._go_back(0)
        found = [self._mask()]
        for count, draft in enumerate(drafts):
            if self._compiled.reason:  # further masks are not needed
                return found
            is_last = not _is_allowed(found[-1], draft)
            if is_last or not self._matcher.try_consume_tokens([draft]):
                self._go_back(count)
                # a token that its mask allows but that meets a limit ends the text
                return found if is_last else [*found, bytes(len(found[-1]))]
            found.append(self._mask())
        self._go_back(len(drafts))
        return found

    def give_up(self, reason: str) -> None:
        """Give up the grammar, for its other matchers, too."""
        self._compiled.reason = reason

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()[: self._compiled.num_bytes]
        if self._matcher.is_error():
            self._error = self._matcher.get_error()
            return bytes(len(mask))
        return mask

    def _go_back(self, num_tokens: int) -> None:
        """Undo the drafts. A matcher that has met a limit cannot go back: make it anew."""
        if self._compiled.reason:
            return
        if self._matcher.is_error():
            self._made = None
        elif num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        if self._compiled.reason:
            return False
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Name the limit that its masks have met; empty if none."""
        found = self._compiled.reason or self._error or self._matcher.get_error()
        found = found or next(filter(None, (other.error for other in self._others)), "")
        return found.removesuffix("<non-verbose/>").strip()


@dataclass(slots=True)
class Rehearsal:
    """A Walker over a few texts that a grammar allows, before it has to be quick.

    Afterwards the library has built most of what the masks need, and slow ones are known.
    """

    matcher: Matcher
    is_abandoned: bool = False

    @property
    def lock(self) -> object:
        """Return a lock of its own: no other walker has the matcher yet."""
        return self

    @property
    def walk_seconds(self) -> float:
        return REHEARSAL_SECONDS

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Walk the texts; the masks are dropped."""
        end = time.thread_time() + REHEARSAL_SECONDS
        rng = random.Random(0)
        matchers = [self.matcher.copy() for _ in range(REHEARSAL_TEXTS)]  # with different locks
        for matcher in matchers:
            for _ in range(REHEARSAL_TOKENS):
                if time.thread_time() > end or self.is_abandoned:
                    return []
                [mask] = matcher.masks(())
                if not any(mask):
                    break
                matcher.advance([_any_allowed(mask, rng)])
        return []

    def give_up(self, reason: str) -> None:
        """Abandon only the rehearsal."""
        self.is_abandoned = True


@dataclass(frozen=True, slots=True)
class LaterRows:
    """A Walker over the rows of a walk from `first` on."""

    first: int
    matcher: Matcher

    @property
    def lock(self) -> object:
        return self.matcher.lock

    @property
    def walk_seconds(self) -> float:
        """Return the time of the matcher, which walked the same rows in the step before."""
        return self.matcher.walk_seconds

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Leave out the masks of earlier rows."""
        return self.matcher.masks_from(self.first, drafts)

    def give_up(self, reason: str) -> None:
        self.matcher.give_up(reason)


def _any_allowed(mask: bytes, rng: random.Random) -> int:
    place = rng.choice(np.flatnonzero(np.frombuffer(mask, np.uint8)))
    return rng.choice([8 * int(place) + bit for bit in range(8) if mask[place] >> bit & 1])


def _is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def _on_a_large_stack(function: Callable[[], list[LLMatcher]]) -> list[LLMatcher]:
    """Run the function in a thread of its own and return its result; its errors are raised here."""
    with ThreadPoolExecutor(max_workers=1) as pool, _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            future = pool.submit(function)
        finally:
            threading.stack_size(before)
    return future.result()
