"""EAGLE drafts: from config.json and tensor shapes to one EagleConfig, whatever the format (EAGLE.md 3.2).

Everything is decided here and in the tables of layouts.py, rename.py and taps.py; nothing behind this module knows formats.
The order: format, sizes, vocabulary, features, norms; each decision is logged with its source.
"""

from dataclasses import dataclass

from weights.config import EagleConfig, LayerConfig, TargetConfig
from weights.errors import Problems
from weights.evidence import Witness
from weights.fields import Fields, read_json_object
from weights.header import TensorEntry
from weights.layouts import Evidence, Layout, find_layout
from weights.reader import Reader
from weights.rename import DRAFT_ROWS, rename
from weights.report import Log
from weights.rope import read_rope, rope_source
from weights.taps import resolve_taps

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A draft worked out from headers and config alone; which copies equal the target's is seen when data is read."""

    config: EagleConfig
    held: dict[str, TensorEntry]
    ignored: dict[str, str]


def resolve_eagle(
    reader: Reader, target: TargetConfig | None, aux_layers: tuple[int, ...] | None, log: Log, problems: Problems
) -> Resolution:
    """Work out what the draft in `reader` is; raises where config.json alone rules it out.

    target: None when a draft is inspected alone; what depends on the target is then left open
    """
    raw = read_json_object(reader.directory / "config.json", problems)
    fields = Fields(raw, "config.json", problems)
    evidence = Evidence(raw=raw, flat=fields.values, names=frozenset(reader.entries))
    layout = find_layout(evidence, problems) if raw else None
    _refuse_values(fields, problems)
    problems.raise_if_any()
    assert layout is not None, "no layout without a problem"
    renamed = rename(reader.entries, DRAFT_ROWS, problems)
    held = {name: reader.entries[old] for name, old in renamed.names.items()}
    witness = Witness(held=held, fields=fields, log=log, problems=problems)
    log.add("format", layout.name, "config.json and tensor names")
    config = _config(witness, layout, target, aux_layers)
    return Resolution(config=config, held=held, ignored=renamed.ignored)


# values of keys that would change the arithmetic and are not built: key -> the only value accepted
ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "quantization_config": None,
    "logit_scale": 1.0,
    "embed_scale": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "final_logit_softcapping": None,
}
LAYER_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "eagle",
    "eagle3",
    "llama4_text",
)


def _refuse_values(fields: Fields, problems: Problems) -> None:
    for key, value in ONLY.items():
        if key in fields and fields.values[key] != value:
            problems.add(f"{fields.source(key)} {fields.values[key]!r:.80} is not supported")


def _config(
    witness: Witness, layout: Layout, target: TargetConfig | None, aux_layers: tuple[int, ...] | None
) -> EagleConfig:
    fields, log = witness.fields, witness.log
    layer = _layer(witness)
    entry = _entry(witness, layer.hidden_size)
    Dt = _target_hidden_size(witness, layer.hidden_size, target)
    V, W = _vocabulary(witness, target)
    has_fc, boundaries = _features(witness, layout, entry, Dt, target, aux_layers)
    has_final_norm = _has_final_norm(witness, layout, entry)
    config = EagleConfig(
        format=layout.name,
        layer=layer,
        num_layers=_num_layers(witness),
        vocab_size=V,
        draft_vocab_size=W,
        target_hidden_size=Dt,
        max_position_embeddings=fields.get(int, "max_position_embeddings", 2048),
        aux_boundaries=boundaries,
        entry="qkv" if entry == "qkv" else "fc",
        has_fc=has_fc,
        fc_bias=_fc_bias(witness),
        norm_before_fc=witness.flag("norm_before_fc", "norm_before_fc", ("input_norm.weight",)),
        has_fc_norm=witness.flag("has_fc_norm", "fc_norm", ("fc_norm.0.weight",)),
        has_embed_norm=witness.flag("has_embed_norm", "layernorms", ("embed_norm.weight",)),
        has_input_layernorm=_has_input_layernorm(witness, entry),
        norm_before_residual=entry == "qkv" and _norm_before_residual(witness, layout),
        has_final_norm=has_final_norm,
        recycled=_recycled(witness, layout, has_final_norm),
        has_own_embedding=_owns(witness, "has_own_embedding", "embed_tokens.weight"),
        has_own_head=_owns(witness, "has_own_head", "lm_head.weight"),
        has_d2t=witness.has("d2t") or W != V,
        sliding_window=_sliding_window(fields),
    )
    log.add("max_position_embeddings", config.max_position_embeddings, fields.source("max_position_embeddings"))
    log.add("d2t", "offsets" if witness.has("d2t") else None, "tensor d2t" if witness.has("d2t") else "d2t is absent")
    log.add("sliding_window", config.sliding_window, fields.source("layer_types", "use_sliding_window"))
    _check_against_target(witness, config)
    return config


def _layer(witness: Witness) -> LayerConfig:
    fields, log, dim = witness.fields, witness.log, witness.dim
    hidden_size = witness.number(
        "hidden_size",
        "hidden_size",
        {
            "layers.0.post_attention_layernorm.weight": dim("layers.0.post_attention_layernorm.weight", 0),
            f"{ATTENTION}o_proj.weight": dim(f"{ATTENTION}o_proj.weight", 0),
            f"{MLP}down_proj.weight": dim(f"{MLP}down_proj.weight", 0),
            "fc.weight": dim("fc.weight", 0),
        },
    )
    num_heads = fields.need(int, "num_attention_heads")
    num_kv_heads = fields.get(int, "num_key_value_heads", num_heads)
    layer = LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=witness.number(
            "intermediate_size",
            "intermediate_size",
            {
                f"{MLP}{name}_proj.weight": dim(f"{MLP}{name}_proj.weight", axis)
                for name, axis in (("down", 1), ("gate", 0), ("up", 0))
            },
            may_lie=True,
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(witness, hidden_size, num_heads, num_kv_heads),
        rms_norm_eps=fields.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(fields, witness.problems),
        qkv_bias=_bias(witness, "qkv_bias", tuple(f"{ATTENTION}{name}_proj.bias" for name in "qkv")),
        o_bias=_bias(witness, "o_bias", (f"{ATTENTION}o_proj.bias",)),
        mlp_bias=_bias(witness, "mlp_bias", tuple(f"{MLP}{name}_proj.bias" for name in ("gate", "up", "down"))),
        qk_norm=_bias(witness, "qk_norm", tuple(f"{ATTENTION}{name}_norm.weight" for name in "qk")),
    )
    log.add("num_heads", num_heads, fields.source("num_attention_heads"))
    log.add("num_kv_heads", num_kv_heads, fields.source("num_key_value_heads"))
    log.add("rms_norm_eps", layer.rms_norm_eps, fields.source("rms_norm_eps"))
    log.add("rope", layer.rope, f"{rope_source(fields)} (never the target's)")
    return layer


def _head_dim(witness: Witness, hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    """Published configs have it wrong (AngelSlim for Qwen3-32B says 80, the tensors 128)."""
    places = {f"{ATTENTION}{name}_norm.weight": witness.dim(f"{ATTENTION}{name}_norm.weight", 0) for name in "qk"}
    rows = (
        ("q_proj", 0, num_heads),
        ("k_proj", 0, num_kv_heads),
        ("v_proj", 0, num_kv_heads),
        ("o_proj", 1, num_heads),
    )
    for name, axis, heads in rows:
        width = witness.dim(f"{ATTENTION}{name}.weight", axis)
        if width is not None and heads > 0 and width % heads == 0:
            places[f"{ATTENTION}{name}.weight"] = width // heads
    return witness.number("head_dim", "head_dim", places, hidden_size // max(num_heads, 1), may_lie=True)


def _bias(witness: Witness, field: str, names: tuple[str, ...]) -> bool:
    """Told by the tensors alone: trainers copy `attention_bias` from the target's config and build none."""
    found = witness.has(*names)
    witness.log.add(field, found, f"{names[0].rpartition('.')[0]}.* is {'there' if found else 'absent'}")
    return found


def _entry(witness: Witness, hidden_size: int) -> str:
    width = witness.dim(f"{ATTENTION}q_proj.weight", 1)
    if witness.has("layers.0.hidden_norm.weight") or width == 2 * hidden_size:
        source = (
            "layers.0.hidden_norm.weight is there"
            if witness.has("layers.0.hidden_norm.weight")
            else "q_proj is 2D wide"
        )
        witness.log.add("entry", "qkv", f"{source} (EAGLE-3)")
        return "qkv"
    witness.log.add("entry", "fc", "no hidden_norm, q_proj is D wide (EAGLE-1)")
    return "fc"


def _num_layers(witness: Witness) -> int:
    indices = [
        int(name.split(".")[1]) for name in witness.held if name.startswith("layers.") and name.split(".")[1].isdigit()
    ]
    written, seen = witness.fields.get(int, "num_hidden_layers", 1), max(indices, default=0) + 1
    source = "tensor names" if seen >= written else witness.fields.source("num_hidden_layers")
    witness.log.add("num_layers", max(written, seen), source)
    return max(written, seen)


def _target_hidden_size(witness: Witness, hidden_size: int, target: TargetConfig | None) -> int:
    written = witness.fields.find(int, "target_hidden_size")
    told = hidden_size if written is None else written
    source = witness.fields.source("target_hidden_size") if written is not None else "the draft's hidden_size"
    if target is None:
        witness.log.add("target_hidden_size", told, source)
        return told
    witness.log.add("target_hidden_size", target.layer.hidden_size, "the target")
    if told != target.layer.hidden_size:
        witness.problems.add(
            f"a draft for another hidden size: {source} says {told}, the target's is {target.layer.hidden_size}"
        )
    return target.layer.hidden_size


def _vocabulary(witness: Witness, target: TargetConfig | None) -> tuple[int, int]:
    """V, the target's, and W, the draft's."""
    fields, dim = witness.fields, witness.dim
    told = {"embed_tokens.weight": dim("embed_tokens.weight", 0), "t2d": dim("t2d", 0)}
    V = target.vocab_size if target else witness.number("vocab_size", "vocab_size", told, default=0)
    if target:
        witness.log.add("vocab_size", V, "the target")
        for what, size in {fields.source("vocab_size"): fields.find(int, "vocab_size"), **told}.items():
            if size is not None and size != V:
                witness.problems.add(f"a draft for another vocabulary: {what} says {size}, the target has {V} tokens")
    rows = {"lm_head.weight": dim("lm_head.weight", 0), "d2t": dim("d2t", 0)}
    return V, witness.number("draft_vocab_size", "draft_vocab_size", rows, default=V)


def _features(
    witness: Witness,
    layout: Layout,
    entry: str,
    Dt: int,
    target: TargetConfig | None,
    aux_layers: tuple[int, ...] | None,
) -> tuple[bool, tuple[int, ...]]:
    """Whether there is an fc, and which boundaries it reads."""
    fields, log = witness.fields, witness.log
    if entry == "fc":
        log.add("aux_boundaries", (), "EAGLE-1 reads the target's hidden after its final norm")
        return True, ()
    if not fields.get(bool, "use_aux_hidden_state", True):
        log.add(
            "aux_boundaries", (), f"{fields.source('use_aux_hidden_state')}: the target's hidden after its final norm"
        )
        return witness.has("fc.weight"), ()
    width = witness.dim("fc.weight", 1)
    if width is not None and width % max(Dt, 1):
        witness.problems.add(
            f"{witness.held['fc.weight'].file.name}: {witness.held['fc.weight'].name} takes {width} channels, no multiple of "
            f"the target's hidden size {Dt}"
        )
        width = None
    num_taps = width // max(Dt, 1) if width is not None else None
    return True, resolve_taps(fields, layout, num_taps, target.num_layers if target else None, aux_layers, log)


def _fc_bias(witness: Witness) -> bool:
    key = next((key for key in ("eagle_fc_bias", "fusion_bias", "bias") if key in witness.fields), "bias")
    return witness.flag("fc_bias", key, ("fc.bias",))


def _has_input_layernorm(witness: Witness, entry: str) -> bool:
    key = "use_input_layernorm_in_first_layer" if entry == "qkv" else "layernorms"
    return witness.flag("has_input_layernorm", key, ("layers.0.input_layernorm.weight",), default=entry == "qkv")


def _has_final_norm(witness: Witness, layout: Layout, entry: str) -> bool:
    keys = {"fc": "layernorms", "qkv": "norm_output" if layout.norm_output == "final_norm" else "use_last_layernorm"}
    return witness.flag("has_final_norm", keys[entry], ("norm.weight",), default=entry == "qkv")


def _norm_before_residual(witness: Witness, layout: Layout) -> bool:
    fields = witness.fields
    value = fields.get(bool, "norm_before_residual", layout.norm_before_residual)
    source = fields.source("norm_before_residual")
    witness.log.add("norm_before_residual", value, f"{source} of {layout.name}" if source == "default" else source)
    return value


def _recycled(witness: Witness, layout: Layout, has_final_norm: bool) -> str:
    log, fields = witness.log, witness.fields
    if layout.recycles_norm and has_final_norm:
        log.add("recycled", "post_norm", f"{layout.name}: the head reads what is recycled")
        return "post_norm"
    if layout.norm_output == "recycled" and fields.get(bool, "norm_output", False):
        log.add("recycled", "post_norm", fields.source("norm_output"))
        return "post_norm"
    if layout.norm_output == "final_norm" and "norm_output" in fields:
        log.note(f"norm_output in a {layout.name} config: a norm before lm_head; what is recycled stays pre_norm")
    log.add("recycled", "pre_norm", fields.source("norm_output") if layout.norm_output == "recycled" else "default")
    return "pre_norm"


def _owns(witness: Witness, field: str, name: str) -> bool:
    found = witness.has(name)
    witness.log.add(field, found, f"{name} is there" if found else f"{name} is absent: the target's")
    return found


def _sliding_window(fields: Fields) -> int | None:
    is_on = "sliding_attention" in fields.strings("layer_types") or fields.get(bool, "use_sliding_window", False)
    return fields.need(int, "sliding_window") if is_on else None


def _check_against_target(witness: Witness, config: EagleConfig) -> None:
    """What can be borrowed must fit, and a smaller vocabulary must say which tokens it holds."""
    D, Dt, V, W = config.layer.hidden_size, config.target_hidden_size, config.vocab_size, config.draft_vocab_size
    add = witness.problems.add
    if W > V > 0:
        add(f"the draft's vocabulary of {W} tokens is larger than the target's {V}")
    if config.norm_before_fc and config.has_fc_norm:
        add("input_norm and fc_norm exclude each other (norm_before_fc, fc_norm)")
    if not config.has_own_embedding and D != Dt:
        add(f"missing embed_tokens.weight [{V}, {D}]: nothing to borrow, the target's hidden size is {Dt}")
    if not config.has_own_head and (D != Dt or W != V):
        add(f"missing lm_head.weight [{W}, {D}]: nothing to borrow, the target's is [{V}, {Dt}]")
    if not config.aux_boundaries and not config.has_fc and D != Dt:
        add(f"no fc: a draft of hidden size {D} cannot read the target's hidden of {Dt}")
