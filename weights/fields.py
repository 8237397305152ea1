"""Typed reads of config.json that name the file, the key and what was expected; every answer remembers its source.

Wrappers (`transformer_layer_config`, `eagle_config`, `model`, `text_config`) are opened first, inner keys winning; null
counts as absent. A wrong type is a problem and the read returns a stand-in, so that one error can list all of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from weights.errors import Problems
from weights.files import read_object

WRAPPERS = ("text_config", "model", "transformer_layer_config", "eagle_config")

T = TypeVar("T", bound=object)
KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
    list: ("a list", (list,)),
    dict: ("an object", (dict,)),
}


def read_json_object(file: Path, problems: Problems) -> dict[str, object]:
    """The JSON object in `file`; {} and a fatal problem if there is none."""
    return read_object(file, problems, fatal=True) or {}


class Fields:
    """The keys of one config file, wrappers opened."""

    def __init__(self, values: Mapping[str, object], file: str, problems: Problems) -> None:
        self.file = file
        self.problems = problems
        self.values: dict[str, object] = {}
        self._paths: dict[str, str] = {}
        self.nulls: set[str] = set()  # keys written as null, where that differs from absent
        self._open(values, "")

    def _open(self, values: Mapping[str, object], path: str) -> None:
        plain = {key: value for key, value in values.items() if value is not None and key not in WRAPPERS}
        self.nulls |= {key for key, value in values.items() if value is None}
        self.values.update(plain)
        self._paths.update({key: path + key for key in plain})
        for wrapper in WRAPPERS:
            inner = values.get(wrapper)
            if isinstance(inner, dict):
                self._open(inner, f"{path}{wrapper}.")
            elif inner is not None:
                self.problems.add(f"{self.file}: {path}{wrapper} is {inner!r:.60}, an object is needed", fatal=True)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def source(self, *keys: str) -> str:
        """Where the answer for `keys` came from: the first one present, or "default"."""
        for key in keys:
            if key in self.values:
                return f"{self.file}: {self._paths[key]}"
        return "default"

    def need(self, kind: type[T], *keys: str) -> T:
        """The first of `keys` that is there; a problem if none is."""
        value = self.find(kind, *keys)
        if value is None:
            if not any(key in self.values for key in keys):
                self.problems.add(f"{self.file}: missing {' or '.join(keys)} ({KINDS[kind][0]})", fatal=True)
            return kind()
        return value

    def get(self, kind: type[T], key: str, default: T) -> T:
        value = self.find(kind, key)
        return default if value is None else value

    def find(self, kind: type[T], *keys: str) -> T | None:
        """The first of `keys` that is there, as `kind`; None if absent or of a wrong type (then it is a problem)."""
        for key in keys:
            if key in self.values:
                return self._typed(kind, key, self.values[key])
        return None

    def _typed(self, kind: type[T], key: str, value: object) -> T | None:
        words, types = KINDS[kind]
        if isinstance(value, types) and not (isinstance(value, bool) and kind is not bool):
            return kind(value)  # type: ignore[call-arg]
        self.problems.add(f"{self.file}: {self._paths[key]} is {value!r:.60}, {words} is needed", fatal=True)
        return None

    def ints(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or one integer."""
        value = self.values.get(key)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if all(type(item) is int for item in items):
            return tuple(items)
        self.problems.add(f"{self.file}: {self._paths[key]} is {value!r:.60}, integers are needed", fatal=True)
        return None

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def layer_types(fields: Fields) -> tuple[str, ...]:
    """The kinds of attention that config.json lists; what is neither full nor a window is a problem."""
    kinds = fields.strings("layer_types")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        fields.problems.add(f"{fields.source('layer_types')} {', '.join(unknown)} is not supported")
    return kinds
