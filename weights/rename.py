"""Names in files -> names here, as rows of (pattern, replacement, whose name it is). Data, no code per format.

Rows are applied in order, each once, to every name. `replacement` None means: harmless, drop it and say so.
The names are those that the formats' own trainers and converters write.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weights.errors import Problems


@dataclass(frozen=True, slots=True)
class Row:
    pattern: str
    replacement: str | None
    origin: str


IGNORED = (
    Row(
        r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
        None,
        "a table that old transformers saved",
    ),
    Row(r"(^|\.)(masked_bias|attn\.bias)$", None, "an attention mask that old transformers saved"),
)

TARGET_ROWS = (*IGNORED, Row(r"^model\.", "", "transformers"))

DRAFT_ROWS = (
    *IGNORED,
    Row(
        r"^(?:(?:model|draft_model|eagle|eagle_module)\.)+", "", "wrappers of trainers and of vLLM"
    ),
    Row(
        r"^verifier_(?:lm_head|norm)\.weight$",
        None,
        "the target's, kept by the speculators trainer",
    ),
    Row(r"^midlayer\.", "layers.0.", "reference EAGLE-3, SpecForge, AngelSlim"),
    Row(r"^midlayers\.(\d+)\.", r"layers.\1.", "SGLang, several layers"),
    Row(r"^fusion_fc\.", "fc.", "speculators eagle"),
    Row(r"^transformer\.", "layers.0.", "speculators eagle"),
    Row(
        r"^(?:embedding_layernorm|embed_layernorm)\.",
        "embed_norm.",
        "speculators eagle, `layernorms`",
    ),
    Row(
        r"^hidden_layernorm\.",
        "layers.0.input_layernorm.",
        "research checkpoints before speculators converted them",
    ),
    Row(
        r"^(?:pre_lm_head_layernorm|lm_head_layernorm)\.",
        "norm.",
        "speculators eagle, `layernorms`",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    names: dict[str, str]  # name here -> name in the file
    ignored: dict[str, str]  # name in the file -> why it is harmless


def rename(names: Iterable[str], rows: tuple[Row, ...], problems: Problems) -> Renamed:
    """Apply `rows` to every name; two names that become one are a problem."""
    renamed = Renamed(names={}, ignored={})
    for name in names:
        new = _apply(name, rows, renamed.ignored)
        if new is None:
            continue
        if new in renamed.names:
            problems.add(f"{name} and {renamed.names[new]} are both {new}")
        renamed.names[new] = name
    return renamed


def _apply(name: str, rows: tuple[Row, ...], ignored: dict[str, str]) -> str | None:
    new = name
    for row in rows:
        if row.replacement is not None:
            new = re.sub(row.pattern, row.replacement, new)
        elif re.search(row.pattern, new):
            ignored[name] = row.origin
            return None
    return new
