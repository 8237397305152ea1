"""The rotary embedding as config.json has it: rope_parameters, or rope_theta and rope_scaling.

Transformers 5 writes the former. Two sources that disagree are refused, not ranked: a silently
wrong base costs acceptance and nothing else would show it.
"""

from collections.abc import Mapping
from typing import Literal, cast, get_args

from weights.config import RopeConfig
from weights.fields import Fields

Kind = Literal["default", "linear", "llama3", "yarn"]
LENGTH = "original_max_position_embeddings"
YARN = (
    *(LENGTH, "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
# kind -> (required keys, optional keys)
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", LENGTH), ("low_freq_factor", "high_freq_factor")),
    "yarn": (("factor",), YARN),
}
TYPES: dict[str, type] = {LENGTH: int, "truncate": bool}
COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def read_rope(
    fields: Fields, default_theta: float = 10000.0, default: Mapping[str, object] | None = None
) -> RopeConfig:
    """The rope of this config. default: its keys where the config has no object with any"""
    scaling = _scaling(fields) or default or {}
    rope = Fields(scaling, f"{fields.file}: {_holder(fields)}", fields.problems)
    kind = rope.find(str, "rope_type", "type") or "default"
    theta = _theta(fields, rope, default_theta)
    if kind not in KEYS:
        only = ", ".join(get_args(Kind))
        rope.add_problem(f"rope type {kind!r} is not supported, only {only}")
        return RopeConfig()
    partial = rope.find(float, "partial_rotary_factor")
    if partial is None:
        partial = fields.get(float, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        rope.add_problem(f"partial_rotary_factor {partial} is not supported, only 1.0")
    return _build(cast(Kind, kind), theta, fields, rope)


def rope_source(fields: Fields) -> str:
    return fields.source("rope_parameters", "rope_scaling", "rope_theta")


def _holder(fields: Fields) -> str:
    keys = [key for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)]
    return " and ".join(keys) or "rope_scaling"


def _scaling(fields: Fields) -> dict[str, object]:
    """The keys of both objects; what both have must be equal."""
    parameters = fields.find(dict, "rope_parameters") or {}
    scaling = fields.find(dict, "rope_scaling") or {}
    new, old = _named(parameters), _named(scaling)
    for key in sorted(new.keys() & old.keys()):
        if new[key] != old[key]:
            both = f"{new[key]!r} in rope_parameters and {old[key]!r} in rope_scaling"
            fields.add_problem(f"{key} is {both}")
    return {**scaling, **parameters}


def _named(found: dict[str, object]) -> dict[str, object]:
    """Add rope_type for `type`, its older name."""
    named = {key: value for key, value in found.items() if key != "type"}
    if named.get("rope_type") is None and "type" in found:
        named["rope_type"] = found["type"]
    return named


def _theta(fields: Fields, rope: Fields, default: float) -> float:
    inner = rope.find(float, "rope_theta")
    outer = fields.find(float, "rope_theta")
    if inner is not None and outer is not None and inner != outer:
        fields.add_problem(f"rope_theta is {outer}, and {inner} in {_holder(fields)}: keep one")
    return next((theta for theta in (inner, outer) if theta is not None), default)


def _build(kind: Kind, theta: float, fields: Fields, rope: Fields) -> RopeConfig:
    required, optional = KEYS[kind]
    unknown = sorted(set(rope.values) - {*required, *optional, *COMMON})
    if unknown:
        rope.add_problem(f"unknown key {', '.join(unknown)} for rope type {kind!r}")
    _fill_length(kind, fields, rope)
    for key in required:
        rope.need(TYPES.get(key, float), key)
    values: dict[str, object] = {}
    if kind == "yarn":
        # transformers: where absent, the config's own length is the original one
        values[LENGTH] = fields.find(int, "max_position_embeddings")
    found = {key: rope.find(TYPES.get(key, float), key) for key in (*required, *optional)}
    values |= {key: value for key, value in found.items() if value is not None}
    built = RopeConfig(theta=theta, kind=kind, **values)  # type: ignore[arg-type]
    _check_order(built, rope)
    return built


def _fill_length(kind: Kind, fields: Fields, rope: Fields) -> None:
    """Some configs have the original length beside the object, where transformers reads it too."""
    outer = fields.find(int, LENGTH) if kind in ("llama3", "yarn") else None
    if outer is None:
        return
    inner = rope.find(int, LENGTH)
    if inner not in (None, outer):
        fields.add_problem(f"{LENGTH} is {outer}, and {inner} in {_holder(fields)}: keep one")
    rope.values[LENGTH] = outer


def _check_order(built: RopeConfig, rope: Fields) -> None:
    if built.kind == "llama3" and built.low_freq_factor >= built.high_freq_factor:
        rope.add_problem(
            f"low_freq_factor is {built.low_freq_factor}, less than high_freq_factor, "
            f"{built.high_freq_factor}, is needed"
        )
    if built.kind == "yarn" and built.beta_slow > built.beta_fast:
        needed = f"at most beta_fast, {built.beta_fast}, is needed"
        rope.add_problem(f"beta_slow is {built.beta_slow}, {needed}")
    if built.kind == "yarn" and built.original_max_position_embeddings is None:
        rope.add_problem(f"missing {LENGTH}, nor is there a max_position_embeddings")
