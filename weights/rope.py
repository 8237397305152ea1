"""The rotary embedding as config.json has it: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

Two sources that disagree are refused, not ranked: a silently wrong base costs acceptance and nothing else would tell.
Kinds that are not built are refused by name.
"""

from typing import Literal, cast, get_args

from weights.config import RopeConfig
from weights.errors import Problems
from weights.fields import Fields

Kind = Literal["default", "linear", "llama3", "yarn"]

# kind -> (keys that must be there, keys that may be)
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "original_max_position_embeddings"),
        ("low_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
    ),
}
TYPES: dict[str, type] = {"original_max_position_embeddings": int, "truncate": bool}
COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def read_rope(fields: Fields, problems: Problems) -> RopeConfig:
    """The rope of this config; theta defaults to 10000, as in every family read here."""
    rope = Fields(_scaling(fields), f"{fields.file}: {_holder(fields)}", problems)
    kind = rope.find(str, "rope_type", "type") or "default"
    theta = _theta(fields, rope, problems)
    if kind not in KEYS:
        problems.add(
            f"{rope.file}: rope type {kind!r} is not supported, only {', '.join(get_args(Kind))}"
        )
        return RopeConfig()
    if (_partial(fields, rope)) != 1.0:
        problems.add(
            f"{rope.file}: partial_rotary_factor {_partial(fields, rope)} is not supported, only 1.0"
        )
    return _build(cast(Kind, kind), theta, fields, rope, problems)


def rope_source(fields: Fields) -> str:
    return fields.source("rope_parameters", "rope_scaling", "rope_theta")


def _holder(fields: Fields) -> str:
    return "rope_parameters" if "rope_parameters" in fields else "rope_scaling"


def _scaling(fields: Fields) -> dict[str, object]:
    parameters = fields.find(dict, "rope_parameters")
    scaling = fields.find(dict, "rope_scaling")
    if parameters and scaling:
        _check_agree(parameters, scaling, fields)
    return dict(parameters or scaling or {})


def _check_agree(parameters: dict[str, object], scaling: dict[str, object], fields: Fields) -> None:
    named = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    differing = sorted(key for key, value in named.items() if parameters.get(key, value) != value)
    for key in differing:
        fields.problems.add(
            f"{fields.file}: {key} is {parameters[key]!r} in rope_parameters and {named[key]!r} in rope_scaling"
        )


def _theta(fields: Fields, rope: Fields, problems: Problems) -> float:
    inner, outer = rope.find(float, "rope_theta"), fields.find(float, "rope_theta")
    if inner is not None and outer is not None and inner != outer:
        problems.add(
            f"{fields.file}: rope_theta is {outer}, but {_holder(fields)}.rope_theta is {inner}: keep one"
        )
    return next((theta for theta in (inner, outer) if theta is not None), 10000.0)


def _partial(fields: Fields, rope: Fields) -> float:
    inner = rope.find(float, "partial_rotary_factor")
    return fields.get(float, "partial_rotary_factor", 1.0) if inner is None else inner


def _build(
    kind: Kind, theta: float, fields: Fields, rope: Fields, problems: Problems
) -> RopeConfig:
    needed, optional = KEYS[kind]
    unknown = sorted(set(rope.values) - set(needed) - set(optional) - set(COMMON))
    if unknown:
        problems.add(f"{rope.file}: unknown key {', '.join(unknown)} for rope type {kind!r}")
    for key in needed:
        rope.need(TYPES.get(key, float), key)
    values: dict[str, object] = {}
    if kind == "yarn":
        # transformers: where absent, the config's own length is the original one
        values["original_max_position_embeddings"] = fields.find(int, "max_position_embeddings")
    found = {key: rope.find(TYPES.get(key, float), key) for key in (*needed, *optional)}
    values |= {key: value for key, value in found.items() if value is not None}
    built = RopeConfig(theta=theta, kind=kind, **values)  # type: ignore[arg-type]
    _check_order(built, rope)
    return built


def _check_order(built: RopeConfig, rope: Fields) -> None:
    """What the formulas divide by is positive only so."""
    if built.kind == "llama3" and built.low_freq_factor >= built.high_freq_factor:
        rope.problems.add(
            f"{rope.file}: low_freq_factor is {built.low_freq_factor}, less than high_freq_factor, "
            f"{built.high_freq_factor}, is needed"
        )
    if built.kind == "yarn" and built.beta_slow > built.beta_fast:
        rope.problems.add(
            f"{rope.file}: beta_slow is {built.beta_slow}, at most beta_fast, {built.beta_fast}, is needed"
        )
    if built.kind == "yarn" and built.original_max_position_embeddings is None:
        rope.problems.add(
            f"{rope.file}: missing original_max_position_embeddings, nor is there a max_position_embeddings"
        )
