"""What a request's text must follow: a JSON schema, a regex, choices or a grammar, as in vLLM.

specdec/guided compiles them, and has the only implementations of the protocols here: so the rest of
the engine does not depend on its package.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from specdec.arguments import is_list, refuse_unknown, refusing_unknown

ANY_OBJECT = '{"type": "object"}'
# a space, or a new line with its indentation: a model that may write more may never stop
JSON_SPACE = r" |\r?\n( {0,24}|\t{0,8})"


class GrammarsBusyError(ValueError):
    """No further grammar is taken for the moment, whatever it is."""


@refusing_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of these. ValueError for anything else.

    json: a JSON schema, as a dict or as text. regex: of the whole text, without lookaround and
    backreferences. choice: the texts that are possible. grammar: in Lark's syntax. json_object:
    True for any JSON object.
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            found = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs: give one of {names}; {found} given")
        _check(given[0], getattr(self, given[0]))

    @staticmethod
    def of(value: object) -> "StructuredOutputsParams":
        """Make one from a dict; return others as they are."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            wanted = "StructuredOutputsParams, or a dict of its fields"
            raise ValueError(f"structured_outputs={value!r:.200}: give {wanted}")
        names = [each.name for each in fields(StructuredOutputsParams)]
        refuse_unknown("structured_outputs", value, names)
        return StructuredOutputsParams(**value)

    def source(self) -> tuple[str, str]:
        """Return the kind of grammar ("json", "regex" or "lark") and its text."""
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "lark", self.grammar
        if self.choice is not None:
            literals = (json.dumps(text, ensure_ascii=False) for text in self.choice)
            literals = (text.replace("\x7f", "\\u007f") for text in literals)  # JSON lets it stand
            # one terminal: as alternatives of a rule, 2,000 would exceed a limit of the parser
            return "lark", f"start: CHOICE\nCHOICE: {' | '.join(literals)}"
        if self.json is None or isinstance(self.json, str):
            return "json", ANY_OBJECT if self.json is None else self.json
        try:
            return "json", json.dumps(self.json, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: json is no JSON schema: {error}") from error


class Guide(Protocol):
    """Stands after the tokens that a request has generated."""

    @property
    def lock(self) -> object: ...  # what some guides share: one of them waits for the other

    @property
    def walk_seconds(self) -> float: ...  # the processor time of its latest walk

    def masks(self, drafts: Sequence[int], first: int = 0) -> list[bytes]:
        """List the tokens that may follow: here, and after each draft up to the first that may not.

        One bit for each id, the lowest bit of a byte first, in whole 32-bit words. first: begin
        with the mask after so many drafts; no masks if one of these may not follow.
        """

    def parts(self, first: int, end: int) -> "Sequence[tuple[int, Guide]]":
        """Split the rows of a walk from `first` up to `end` among threads: the first row of each
        part, and what finds its masks.
        """

    def copy(self) -> "Guide": ...  # at its position

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by generated tokens, which its masks have allowed."""

    def give_up(self, reason: str) -> None:
        """Allow nothing from here on. Another thread may be within `masks`, which goes on there."""

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called, of it or of another guide of its grammar."""

    @property
    def is_complete(self) -> bool: ...  # whether the text so far may end here

    @property
    def error(self) -> str: ...  # the limit that its masks have met; empty if none


class GuideSource(Protocol):
    """Turns grammars into guides. Any thread may call it."""

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """Make a guide before the first token; ValueError with the compiler's message."""

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it for a server; GrammarsBusyError while it takes no new ones."""


def _check(name: str, value: Any) -> None:
    """Raise ValueError if a value is of another kind than its name says."""
    wanted = None
    if name in ("regex", "grammar") and (not isinstance(value, str) or not value.strip()):
        wanted = "text"
    elif name == "json" and not isinstance(value, str | Mapping):
        wanted = "a JSON schema"
    elif name == "json_object" and value is not True:
        wanted = "True"
    elif name == "choice" and not (
        is_list(value) and value and all(isinstance(text, str) and text for text in value)
    ):
        wanted = "a list of non-empty strings"
    elif name == "choice" and any("\ud800" <= char <= "\udfff" for text in value for char in text):
        wanted = "text without halves of surrogate pairs"
    if wanted is not None:
        raise ValueError(f"structured_outputs: {name}={value!r:.200}: give {wanted}")
