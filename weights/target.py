"""Targets: what config.json says about a model of a known family (families/table.py)."""

from weights.config import TargetConfig
from weights.errors import Problems
from weights.families.family import Family
from weights.families.kinds import read_layers
from weights.families.table import FAMILIES
from weights.fields import (
    INTEGERS,
    Fields,
    Range,
    read_json_object,
    refuse_values,
)
from weights.files.guard import is_there
from weights.files.header import FLOAT_DTYPES
from weights.files.reader import Reader
from weights.rename import TARGET_ROWS, Row, rename
from weights.report import Log

CONFIG = "config.json"
SUPPORTED = {"hidden_act": "silu"}


def target_rows(reader: Reader) -> tuple[Row, ...]:
    """Rename rows of the family in `reader`; what its config has wrong is resolve_target's."""
    ignored = Problems(reader.directory)
    fields = Fields(read_json_object(reader.directory / CONFIG, ignored), CONFIG, ignored)
    family = FAMILIES.get(_model_type(fields))
    return TARGET_ROWS if family is None else (*TARGET_ROWS, *family.names)


def resolve_target(reader: Reader, log: Log) -> TargetConfig:
    """The target's config, checked; raises only if nothing more can be known."""
    problems = reader.problems
    raw = read_json_object(reader.directory / CONFIG, problems)
    problems.raise_if_fatal()
    fields = Fields(raw, CONFIG, problems)
    family = _family(fields)
    vocab_size = fields.need(int, "vocab_size")
    length = family.max_position_embeddings
    num_layers = _num_layers(reader, fields)
    config = TargetConfig(
        model_type=_model_type(fields),
        layers=read_layers(fields, family, num_layers, len(reader.entries), log, _modules(reader)),
        vocab_size=vocab_size,
        max_position_embeddings=fields.get(int, "max_position_embeddings", length),
        has_tied_head=fields.get(bool, "tie_word_embeddings", False),
        dtype=stored_dtype(reader),
        bos_token_id=fields.find(int, "bos_token_id"),
        eos_token_ids=_eos_token_ids(reader, fields, vocab_size, log),
        **(_read_multipliers(fields, log) if family.has_multipliers else {}),
    )
    log.add_read(fields, config, num_layers="num_hidden_layers", vocab_size="vocab_size")
    log.add_read(fields, config, max_position_embeddings="max_position_embeddings")
    log.add_read(fields, config, has_tied_head="tie_word_embeddings", bos_token_id="bos_token_id")
    log.add("dtype", config.dtype, "embed_tokens.weight")
    problems.raise_if_fatal()
    return config


def _modules(reader: Reader) -> dict[str, str]:
    """Give the names of modules in files, by ours."""
    held = rename(reader, target_rows(reader), Log())
    pairs = ((name, entry.name) for name, entry in held.items() if name.endswith(".weight"))
    return {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in pairs}


def _num_layers(reader: Reader, fields: Fields) -> int:
    """The number of layers; a problem, and none, if there are fewer tensors."""
    num_layers = fields.need(int, "num_hidden_layers")
    if num_layers <= len(reader.entries):
        return num_layers
    counts = f"{num_layers} layers, but only {len(reader.entries)} tensors"
    fields.problems.add(f"{fields.source('num_hidden_layers')}: {counts}", fatal=True)
    return 0


def stored_dtype(reader: Reader) -> str:
    """The dtype of the embedding, or else of the first tensor, as torch names it: "bfloat16"."""
    entries = list(reader.entries.values())
    embeddings = (each for each in entries if each.name.endswith("embed_tokens.weight"))
    entry = next(embeddings, entries[0] if entries else None)
    return FLOAT_DTYPES.get(entry.dtype, entry.dtype) if entry is not None else "unknown"


def _model_type(fields: Fields) -> str:
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    named = (by_architecture.get(name) for name in fields.strings("architectures"))
    return fields.get(str, "model_type", next(filter(None, named), ""))


def _family(fields: Fields) -> Family:
    model_type = _model_type(fields)
    if model_type not in FAMILIES:
        line = f"model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}"
        fields.add_problem(line, fatal=True)
        fields.problems.raise_if_fatal()
    family = FAMILIES[model_type]
    architectures = fields.strings("architectures")
    if architectures and family.architecture not in architectures:
        is_draft = any("Eagle" in name for name in architectures)
        fields.add_problem(
            f"architectures {list(architectures)}: only {family.architecture} is supported for "
            f"model_type {model_type!r}{'; this is an EAGLE draft, no target' if is_draft else ''}",
            fatal=True,
        )
    refuse_values(fields, SUPPORTED)
    fields.problems.raise_if_fatal()
    return family


def _eos_token_ids(reader: Reader, fields: Fields, vocab_size: int, log: Log) -> tuple[int, ...]:
    """The ids of config.json, then of generation_config.json; min_tokens indexes logits by them."""
    limits = Range(0, vocab_size - 1) if vocab_size else INTEGERS
    file = reader.directory / "generation_config.json"
    raw = read_json_object(file, fields.problems) if is_there(file) else {}
    generation = Fields(raw, file.name, fields.problems)
    ids: dict[int, None] = {}  # an ordered set
    sources = []
    for each in (fields, generation):
        if "eos_token_id" in each:
            ids |= dict.fromkeys(each.ints("eos_token_id", limits) or ())
            sources.append(each.source("eos_token_id"))
    log.add("eos_token_ids", tuple(ids), ", ".join(sources) or "default")
    return tuple(ids)


def _read_multipliers(fields: Fields, log: Log) -> dict[str, float]:
    found = {key: fields.get(float, key, 1.0) for key in ("embedding_multiplier", "logits_scaling")}
    for key, value in found.items():
        log.add(key, value, fields.source(key))
    return found
