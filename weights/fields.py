"""Typed reads of config.json that name the file, the key and the type; every answer has a source.

Wrappers (`transformer_layer_config`, `eagle_config`, `dflash_config`, `model`, `text_config`) are
opened first, inner keys winning; null counts as absent. A wrong type or a number outside its key's
range is a problem and the read returns a stand-in, so that one error can list all of them.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weights.config import LayerKind
from weights.errors import Problems
from weights.files.guard import read_object

WRAPPERS = ("text_config", "model", "transformer_layer_config", "eagle_config", "dflash_config")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both allowed; NaN is outside."""

    low: float
    high: float
    step: int = 1

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and (self.step == 1 or value % self.step == 0)

    def __str__(self) -> str:
        multiple = f" and a multiple of {self.step}" if self.step > 1 else ""
        return f"from {self.low:.10g} to {self.high:.10g}{multiple}"


SIZE = Range(1, 2**31 - 1)
SCALE = Range(1e-3, 1e6)
MULTIPLIER = Range(1e-6, 1e6)
# key -> its values, wherever it stands
RANGES = {
    **dict.fromkeys(("hidden_size", "target_hidden_size", "intermediate_size"), SIZE),
    "num_nextn_predict_layers": SIZE,
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "sliding_window"), SIZE),
    "original_max_position_embeddings": SIZE,
    "max_position_embeddings": Range(2, 2**31 - 1),  # a token and its successor
    "max_window_layers": Range(0, 2**31 - 1),
    "block_size": Range(2, 4096),  # the last sampled token and a draft
    **dict.fromkeys(("mask_token_id", "ptd_token_id", "pard_token"), Range(0, 2**31 - 1)),
    "num_depths": SIZE,
    "markov_rank": Range(0, 2**31 - 1),  # 0: no such head
    **dict.fromkeys(("conv_group_size", "selector_rank"), SIZE),
    "selector_top_k": Range(1, 64),
    "head_dim": Range(2, 65536, step=2),  # rope rotates pairs
    "rms_norm_eps": Range(0, 1),
    "rope_theta": Range(2, 1e30),
    **dict.fromkeys(("factor", "attention_factor", "low_freq_factor", "high_freq_factor"), SCALE),
    **dict.fromkeys(("beta_fast", "beta_slow"), SCALE),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), SIZE),
    **dict.fromkeys(("moe_intermediate_size", "decoder_sparse_step", "experts_per_token"), SIZE),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), SCALE),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier"), MULTIPLIER),
    **dict.fromkeys(("residual_multiplier", "logits_scaling"), MULTIPLIER),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Range(0, 1e6)),  # 0: none
}
# a key without a row: what int64 and float32 can hold
INTEGERS = Range(-(2**63), 2**63 - 1)
NUMBERS: dict[type, Range] = {int: INTEGERS, float: Range(-3e38, 3e38)}

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
        for key, value in values.items():
            if value is None:
                self.nulls.add(key)
            elif key not in WRAPPERS:
                self.values[key] = value
                self._paths[key] = path + key
        for wrapper in WRAPPERS:
            inner = values.get(wrapper)
            if isinstance(inner, dict):
                self._open(inner, f"{path}{wrapper}.")
            elif inner is not None:
                line = f"{path}{wrapper} is {reprlib.repr(inner)}, an object is needed"
                self.add_problem(line, fatal=True)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def add_problem(self, line: str, fatal: bool = False) -> None:
        self.problems.add(f"{self.file}: {line}", fatal)

    def source(self, *keys: str) -> str:
        """Where the answer for `keys` came from: the first one present, or "default"."""
        key = self.first(*keys)
        return "default" if key is None else f"{self.file}: {self._paths[key]}"

    def first(self, *keys: str) -> str | None:
        return next((key for key in keys if key in self.values), None)

    def need(self, kind: type[T], key: str) -> T:
        """The value of `key`; a problem if it is absent."""
        value = self.find(kind, key)
        if value is None and key not in self.values:
            self.add_problem(f"missing {key} ({KINDS[kind][0]})", fatal=True)
        return kind() if value is None else value

    def get(self, kind: type[T], key: str, default: T) -> T:
        value = self.find(kind, key)
        return default if value is None else value

    def find(self, kind: type[T], *keys: str) -> T | None:
        """The first of `keys` that is present, as `kind`; None if absent, or wrong (a problem)."""
        key = self.first(*keys)
        return None if key is None else self._typed(kind, key, self.values[key])

    def _typed(self, kind: type[T], key: str, value: object) -> T | None:
        words, types = KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
            self.refuse(key, value, f"{words} is needed")
            return None
        limits = RANGES.get(key, NUMBERS.get(kind))
        if limits is not None and isinstance(value, int | float) and value not in limits:
            self.refuse(key, value, f"{words} {limits} is needed")
            return None
        return kind(value)  # type: ignore[call-arg]

    def refuse(self, key: str, value: object, needed: str) -> None:
        self.add_problem(f"{self._paths[key]} is {reprlib.repr(value)}, {needed}", fatal=True)

    def ints(self, key: str, limits: Range = INTEGERS) -> tuple[int, ...] | None:
        """A list of integers, or one integer."""
        value = self.values.get(key)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if all(type(item) is int and item in limits for item in items):
            return tuple(items)
        self.refuse(key, value, f"integers are needed {limits}")
        return None

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key, [])
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.refuse(key, value, "a list of strings is needed")
        return ()


def check_size(name: str, value: int, source: str, problems: Problems) -> None:
    """Check a number that no key states against the range of the key `name`."""
    if value not in RANGES[name]:
        line = f"{source}: {name} is {value}, an integer {RANGES[name]} is needed"
        problems.add(line, fatal=True)


def check_layer(layer: LayerKind, head_dim_source: str, fields: Fields) -> None:
    """Check what no single key states, and switches that not every family and format reads."""
    for key in ("attention_bias", "mlp_bias"):
        fields.find(bool, key)
    is_derived = head_dim_source == "default"
    source = f"{fields.file}: hidden_size / num_attention_heads" if is_derived else head_dim_source
    check_size("head_dim", layer.head_dim, source, fields.problems)
    if layer.num_kv_heads and layer.num_heads % layer.num_kv_heads:
        fields.add_problem(
            f"num_attention_heads is {layer.num_heads}, a multiple of num_key_value_heads, "
            f"{layer.num_kv_heads}, is needed"
        )


def refuse_values(fields: Fields, supported: Mapping[str, object]) -> None:
    """Refuse other values than `supported` for keys that change the computation."""
    for key, value in supported.items():
        if key in fields and fields.values[key] != value:
            fields.problems.add(f"{fields.source(key)} {fields.values[key]!r:.80} is not supported")


def layer_types(fields: Fields) -> tuple[str, ...]:
    """The kinds of attention that config.json lists, full or sliding; others are a problem."""
    kinds = fields.strings("layer_types")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        fields.problems.add(f"{fields.source('layer_types')} {', '.join(unknown)} is not supported")
    return kinds
