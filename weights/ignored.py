"""Which modules a quantization_config leaves plain, by the names and patterns that it lists.

compressed-tensors means whole names, and with "re:" patterns that a name begins with. "fp8" means
modules and all that they hold, with or without what stands before them, and takes names with
special characters for patterns (transformers, quantizers/quantizers_utils.py).

Patterns are untrusted: those that could take for ever on a name are refused.
"""

import math
import re
from collections.abc import Iterator, Sequence

PATTERN = "re:"  # begins a pattern of compressed-tensors
SPECIAL = frozenset("*+?[](){}|^$\\")
MOST_CHARACTERS = 200  # of a pattern, and of a name that it may fit
MOST_REPEATS = 3
MOST_PATTERNS = 64  # published ones have ten at most, and any number of names
MOST_WAYS = 64**4  # to fit: 64 of a repeat, 8 of what may be absent, n * n of n alternatives
REPEAT = re.compile(r"[*+{]")
REPEATED_GROUP = re.compile(r"\)[*+{]")
OPTION = re.compile(r"(?<![(*+?}])\?")
NO_CHOICE = re.compile(r"\\.|\[[^]]*\]")  # a character by itself, or one of a set
BORDER = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name


class Ignored:
    """Tells modules that are left plain by their names in files, and which entries said so.

    has_parts: names and patterns are meant as "fp8" means them. ValueError: a pattern is refused
    """

    def __init__(self, entries: Sequence[str] = (), *, has_parts: bool = False) -> None:
        self._has_parts = has_parts
        self._unused = dict.fromkeys(entries)
        self._names = {entry for entry in entries if not self._is_pattern(entry)}
        patterns = [entry for entry in entries if self._is_pattern(entry)]
        if len(patterns) > MOST_PATTERNS:
            raise ValueError(
                f"it has {len(patterns)} patterns, and at most {MOST_PATTERNS} are read"
            )
        self._patterns = {entry: self._compiled(entry) for entry in patterns}

    def __contains__(self, module: str) -> bool:
        found = [name for name in self._names_of(module) if name in self._names]
        if len(module) <= MOST_CHARACTERS:  # no family has a longer one
            found += [entry for entry, fits in self._patterns.items() if fits.match(module)]
        for entry in found:
            self._unused.pop(entry, None)
        return bool(found)

    @property
    def unused(self) -> list[str]:
        """List the entries that no module fitted which was asked for."""
        return list(self._unused)

    def _names_of(self, module: str) -> Iterator[str]:
        """List the names by which an entry may mean this module."""
        yield module
        if self._has_parts:
            parts = module.split(".")
            for i in range(1, len(parts)):
                yield ".".join(parts[:i])
                yield ".".join(parts[i:])

    def _is_pattern(self, entry: str) -> bool:
        if self._has_parts:
            return not SPECIAL.isdisjoint(entry)
        return entry.startswith(PATTERN)

    def _compiled(self, entry: str) -> re.Pattern[str]:
        text = entry if self._has_parts else entry.removeprefix(PATTERN)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"{entry!r:.80} is longer than {MOST_CHARACTERS} characters")
        if REPEATED_GROUP.search(text) or len(REPEAT.findall(text)) > MOST_REPEATS:
            raise ValueError(f"{entry!r:.80} repeats a group, or more than {MOST_REPEATS} times")
        if _ways(text) > MOST_WAYS:
            raise ValueError(f"{entry!r:.80} has too many alternatives for a pattern")
        try:
            return re.compile(f"(?:{text}){BORDER}" if self._has_parts else text)
        except re.error as error:
            raise ValueError(f"{entry!r:.80} is no pattern: {error}") from error


def _ways(pattern: str) -> int:
    """Bound the ways in which a pattern may fit a name, since a search may try all of them."""
    text = NO_CHOICE.sub("", pattern)
    ways: int = 64 ** len(REPEAT.findall(text)) * 8 ** len(OPTION.findall(text))
    alternatives = [1]  # of the groups that are open, and of the whole
    for character in text:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1
        elif character == ")" and len(alternatives) > 1:
            inner = alternatives.pop()
            ways *= inner * inner
    whole = math.prod(alternatives)
    return ways * whole * whole
