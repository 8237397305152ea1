"""Targets: what config.json says about a Llama, Mistral, Qwen2 or Qwen3 model. A family is a row, not a class.

Facts of the rows: transformers, models/{llama,mistral,qwen2,qwen3}/configuration_*.py and modeling_*.py.
"""

from dataclasses import dataclass

from weights.config import LayerConfig, TargetConfig
from weights.errors import Problems
from weights.fields import INTEGERS, Fields, Range, check_layer, layer_types, read_json_object
from weights.files.guard import is_there
from weights.files.reader import Reader
from weights.report import Log
from weights.rope import read_rope, rope_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model type differs from plain Llama; `None` or a key of config.json that decides."""

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = (
        None  # where config.json has none; None: hidden_size / num_attention_heads
    )
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    window_switch: str | None = None  # the key that turns the window on


FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", max_position_embeddings=131072, sliding_window=4096
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        max_position_embeddings=32768,
        sliding_window=4096,
        window_switch="use_sliding_window",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_window=4096,
        window_switch="use_sliding_window",
    ),
}


def resolve_target(reader: Reader, log: Log, problems: Problems) -> TargetConfig:
    """The target's config, checked; raises only where nothing more could be told."""
    raw = read_json_object(reader.directory / "config.json", problems)
    problems.raise_if_fatal()
    fields = Fields(raw, "config.json", problems)
    family = _family(fields, problems)
    problems.raise_if_fatal()
    assert family is not None, "an unknown family is fatal"
    vocab_size = fields.need(int, "vocab_size")
    config = TargetConfig(
        model_type=_model_type(fields),
        layer=_layer(fields, family, log, problems),
        num_layers=fields.need(int, "num_hidden_layers"),
        vocab_size=vocab_size,
        max_position_embeddings=fields.get(
            int, "max_position_embeddings", family.max_position_embeddings
        ),
        has_tied_head=fields.get(bool, "tie_word_embeddings", False),
        dtype=stored_dtype(reader),
        bos_token_id=fields.find(int, "bos_token_id"),
        eos_token_ids=_eos_token_ids(reader, fields, vocab_size, log),
        sliding_window=_sliding_window(fields, family, log),
    )
    keys = {"num_layers": "num_hidden_layers", "has_tied_head": "tie_word_embeddings"}
    for name in (
        "num_layers",
        "vocab_size",
        "max_position_embeddings",
        "has_tied_head",
        "bos_token_id",
    ):
        log.add(name, getattr(config, name), fields.source(keys.get(name, name)))
    log.add("dtype", config.dtype, "embed_tokens.weight")
    if config.num_layers > len(reader.entries):
        problems.add(
            f"{fields.source('num_hidden_layers')}: {config.num_layers} layers, but only {len(reader.entries)} tensors",
            fatal=True,
        )
    problems.raise_if_fatal()
    return config


def stored_dtype(reader: Reader) -> str:
    """The dtype of the embedding as torch names it, "bfloat16"; the first tensor's where there is none."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    entries = sorted(
        reader.entries.values(), key=lambda entry: not entry.name.endswith("embed_tokens.weight")
    )
    return names.get(entries[0].dtype, entries[0].dtype) if entries else "unknown"


def _model_type(fields: Fields) -> str:
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    named = next(
        (
            by_architecture[name]
            for name in fields.strings("architectures")
            if name in by_architecture
        ),
        "",
    )
    return fields.get(str, "model_type", named)


def _family(fields: Fields, problems: Problems) -> Family | None:
    model_type, known = _model_type(fields), ", ".join(FAMILIES)
    family = FAMILIES.get(model_type)
    if family is None:
        problems.add(
            f"{fields.file}: model_type {model_type!r} is not supported, only {known}", fatal=True
        )
        return None
    architectures = fields.strings("architectures")
    if architectures and family.architecture not in architectures:
        is_draft = any("Eagle" in name for name in architectures)
        problems.add(
            f"{fields.file}: architectures {list(architectures)}: only {family.architecture} is supported for "
            f"model_type {model_type!r}{'; this is an EAGLE draft, no target' if is_draft else ''}",
            fatal=True,
        )
    for key, needed in (("hidden_act", "silu"), ("quantization_config", None)):
        if key in fields and fields.values[key] != needed:
            problems.add(f"{fields.file}: {key} {fields.values[key]!r:.80} is not supported")
    return family


def _layer(fields: Fields, family: Family, log: Log, problems: Problems) -> LayerConfig:
    hidden_size, num_heads = (
        fields.need(int, "hidden_size"),
        fields.need(int, "num_attention_heads"),
    )
    head_dim = family.head_dim or hidden_size // max(num_heads, 1)
    layer = LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.need(int, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.get(int, "num_key_value_heads", num_heads),
        head_dim=fields.get(int, "head_dim", head_dim),
        rms_norm_eps=fields.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(fields, problems),
        qkv_bias=_switch(fields, family.qkv_bias),
        o_bias=_switch(fields, family.o_bias),
        mlp_bias=_switch(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
    )
    check_layer(layer, fields.source("head_dim"), fields)
    _log_layer(layer, fields, family, log)
    return layer


def _log_layer(layer: LayerConfig, fields: Fields, family: Family, log: Log) -> None:
    keys = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rms_norm_eps",
    ):
        log.add(name, getattr(layer, name), fields.source(keys.get(name, name)))
    log.add("rope", layer.rope, rope_source(fields))
    for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        switch = getattr(family, name)
        log.add(
            name,
            getattr(layer, name),
            fields.source(switch) if isinstance(switch, str) else "the model family",
        )


def _switch(fields: Fields, switch: bool | str) -> bool:
    return fields.get(bool, switch, False) if isinstance(switch, str) else switch


def _eos_token_ids(reader: Reader, fields: Fields, vocab_size: int, log: Log) -> tuple[int, ...]:
    """Those of config.json, then those that only generation_config.json has; min_tokens indexes logits by them."""
    problems, limits = fields.problems, Range(0, vocab_size - 1) if vocab_size else INTEGERS
    file = reader.directory / "generation_config.json"
    generation = Fields(
        read_json_object(file, problems) if is_there(file) else {}, file.name, problems
    )
    ids = [
        token for each in (fields, generation) for token in each.ints("eos_token_id", limits) or ()
    ]
    sources = [
        each.source("eos_token_id") for each in (fields, generation) if "eos_token_id" in each
    ]
    log.add("eos_token_ids", tuple(dict.fromkeys(ids)), ", ".join(sources) or "default")
    return tuple(dict.fromkeys(ids))


def _sliding_window(fields: Fields, family: Family, log: Log) -> int | None:
    """The window, if any layer uses one."""
    window = _window_of_some_layer(fields, family)
    keys = [
        key for key in ("layer_types", family.window_switch, "sliding_window") if key is not None
    ]
    log.add("sliding_window", window, fields.source(*keys))
    return window


def _window_of_some_layer(fields: Fields, family: Family) -> int | None:
    is_on = family.sliding_window is not None
    if family.window_switch is not None:
        is_on = fields.get(bool, family.window_switch, False)
    kinds = layer_types(fields)
    starts = fields.get(int, "max_window_layers", 0) if family.window_switch else 0
    if not is_on or (kinds and "sliding_attention" not in kinds):
        return None
    if not kinds and starts >= fields.need(int, "num_hidden_layers"):
        return None
    return (
        None
        if "sliding_window" in fields.nulls
        else fields.get(int, "sliding_window", family.sliding_window or 0)
    )
