"""Grammars compiled by llguidance, and matchers that say which tokens may follow.

A grammar comes from a request, so its size is bounded, and so is the work of compiling it and of
every mask: the limits count operations, which bounds most masks; mask_threads.py bounds the rest by
time. The compiler recurses over the rules of a grammar, thousands of them in a hostile one, so it
runs on a stack that holds the longest grammar. Nothing is fetched: a $ref to another document is an
error.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.guided.mask_threads import most_threads
from specdec.requests.json_schemas import prepared_text
from specdec.requests.structured_outputs import JSON_SPACE, Guide
from specdec.requests.tokenizer import Tokenizer

# else the library captures a stack for each of a grammar's rules that an error passes through:
# with RUST_BACKTRACE=1, 4,000 rules took 75 s
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")

MAX_CHARS = 1 << 17  # of a grammar
REPEAT_SECONDS = 0.005  # of a processor, for compiling a grammar again for further threads
# of a processor, for a mask: a grammar's walks that take more are shared. A mask within a string of
# bounded length takes 0.001 with 128,000 tokens
SLOW_SECONDS = 0.0003
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
    "json": lambda text: LLMatcher.grammar_from_json_schema(
        prepared_text(text), defaults={"whitespace_pattern": JSON_SPACE}
    ),
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
        compile_one = partial(_on_a_large_stack, partial(self._starts, kind, text, 1))
        try:
            starts = _on_a_large_stack(partial(self._starts, kind, text, most_threads()))
        except ValueError as error:
            raise ValueError(f"structured_outputs: {kind}: {error}") from error
        if starts[0].is_error():
            words = starts[0].get_error().replace(OVERLAP, ADVICE)
            raise ValueError(f"structured_outputs: {kind}: {words}")
        found = Compiled(starts, self._num_bytes, compile_one)
        self._alive.add(found)
        return Matcher(found, self._eos_token_ids)

    def _starts(self, kind: str, text: str, most: int) -> list[LLMatcher]:
        """Compile a matcher, and if that is quick, further ones up to `most`."""
        end = time.thread_time() + REPEAT_SECONDS
        starts: list[LLMatcher] = []
        while not starts or (len(starts) < most and time.thread_time() < end):
            grammar = FORMATS[kind](text)
            starts.append(LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))
            if starts[0].is_error():
                break
        return starts


class Compiled:
    """A grammar. Its matchers copy one of `starts`, and the copies of one share a lock and a lexer.

    compile_one: compiles a start with an empty lexer. num_bytes: of a mask. reason: why the grammar
    was given up, or "". num_slow_masks: so far. walk_seconds: of the latest walk of any matcher.
    """

    def __init__(
        self, starts: list[LLMatcher], num_bytes: int, compile_one: Callable[[], list[LLMatcher]]
    ) -> None:
        self.starts = starts
        self.num_bytes = num_bytes
        self.reason = ""
        self.num_slow_masks = 0
        self.walk_seconds = 0.0
        self._compile_one = compile_one
        self._replacing = threading.Lock()
        self._users: list[WeakSet[Matcher]] = [WeakSet() for _ in starts]

    def start_of(self, matcher: "Matcher") -> tuple[int, LLMatcher]:
        """Pick the start that the fewest other matchers have; return its number, too."""
        number, users = min(enumerate(self._users), key=lambda each: len(each[1]))
        users.add(matcher)
        return number, self.starts[number]

    def replaced(self, number: int, full: LLMatcher) -> tuple[LLMatcher, bool]:
        """Replace the start of this number if it is `full`; return it, and whether it is new."""
        with self._replacing:
            is_first = self.starts[number] is full
            if is_first:
                [self.starts[number]] = self._compile_one()
            return self.starts[number], is_first


class Matcher:
    """A Guide: stands after the tokens that a request has generated.

    tokens: generated so far; if there are any, the library's matcher is made by the first walk, in
    its thread. walk_seconds: of the latest walk, of a processor; before the first, of another one's
    """

    def __init__(
        self, compiled: Compiled, eos_token_ids: frozenset[int], tokens: Sequence[int] = ()
    ) -> None:
        self._compiled = compiled
        self._number, self._start = compiled.start_of(self)
        self._made = None if tokens else self._start.deep_copy()
        self._tokens = list(tokens)
        self._others: list[Matcher] = []  # at the same position, for parts of a slow walk
        self._eos_token_ids = eos_token_ids
        self.walk_seconds = compiled.walk_seconds
        self._error = ""
        self._rows = np.zeros((0, compiled.num_bytes), np.uint8)
        self._nothing = bytes(compiled.num_bytes)  # a mask that allows no token

    @property
    def lock(self) -> object:
        """What copies of one start share in llguidance."""
        return self._start

    @property
    def _matcher(self) -> LLMatcher:
        if self._made is None:
            self._made = self._start.deep_copy()
            self._made.consume_tokens(self._tokens)
        return self._made

    def copy(self) -> "Matcher":
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

    def parts(self, first: int, end: int) -> list[tuple[int, Guide]]:
        """Split a walk into rows, if the grammar is slow, on as many threads as it has locks."""
        is_slow = self._compiled.num_slow_masks > 1  # one may be the first of a process
        count = min(end - first, len(self._compiled.starts)) if is_slow else 1
        while len(self._others) < count - 1:
            self._others.append(self.copy())
        firsts = [first + number * (end - first) // count for number in range(count)]
        return list(zip(firsts, [self, *self._others], strict=False))

    @property
    def is_given_up(self) -> bool:
        return bool(self._compiled.reason)

    def give_up(self, reason: str) -> None:
        """Give up the grammar, for its other matchers, too."""
        self._compiled.reason = reason

    def masks(self, drafts: Sequence[int], first: int = 0) -> list[bytes]:
        """List the tokens that may follow, as a Guide does.

        Where a limit is met no token may follow, and `error` says which.
        """
        if not self._eos_token_ids.isdisjoint(drafts):
            drafts = list(takewhile(lambda token: token not in self._eos_token_ids, drafts))
        if self._compiled.reason:
            return [self._nothing]
        if first == 0 or self._matcher.is_error():
            return self._masks(drafts)[first:]
        if len(drafts) < first:
            return []
        num_taken = self._matcher.try_consume_tokens(list(drafts[:first]))
        if self._matcher.is_error():  # a limit is met before row `first`, or there
            self._go_back(0)
            return self._masks(drafts)[first:]
        found = []
        if num_taken >= first - 1:
            self._tokens += drafts[:num_taken]
            found = self._masks(drafts[num_taken:])[first - num_taken :]
            del self._tokens[len(self._tokens) - num_taken :]
        self._go_back(num_taken)
        return found

    def _masks(self, drafts: Sequence[int]) -> list[bytes]:
        found = self._masks_at_once(drafts)
        has_own_lexer = False
        # the texts of all copies of its start may have filled their lexer together
        while found is None and not has_own_lexer and FULL in self._matcher.get_error():
            self._start, has_own_lexer = self._compiled.replaced(self._number, self._start)
            self._made = None
            found = self._masks_at_once(drafts)
        if self._compiled.reason:  # further masks are not needed
            return [self._nothing]
        return self._masks_one_by_one(drafts) if found is None else found

    def _masks_at_once(self, drafts: Sequence[int]) -> list[bytes] | None:
        """Compute masks in one call, during which other threads run; None if a limit is met."""
        if self._matcher.is_error():
            return None
        num_bytes = self._compiled.num_bytes
        if len(self._rows) <= len(drafts):
            self._rows = np.zeros((1 + len(drafts), num_bytes), np.uint8)
        self._rows.fill(0)  # the call may end before the last
        pointer = self._rows.ctypes.data
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
        masks = [self._rows[0].tobytes()]
        for row, draft in zip(self._rows[1:], drafts, strict=False):
            if not _is_allowed(masks[-1], draft):
                break
            masks.append(row.tobytes())
        if seconds > SLOW_SECONDS * len(masks):
            self._compiled.num_slow_masks += len(masks)
        return masks

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
                return found if is_last else [*found, self._nothing]
            found.append(self._mask())
        self._go_back(len(drafts))
        return found

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()[: self._compiled.num_bytes]
        if self._matcher.is_error():
            self._error = self._matcher.get_error()
            return self._nothing
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
        found = self._compiled.reason or self._error or self._matcher.get_error()
        found = found or next(filter(None, (other.error for other in self._others)), "")
        return found.removesuffix("<non-verbose/>").strip()


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
