"""Names in files -> names of this package, as rows of (pattern, replacement, origin): data.

Rows are applied in order, each once, to every name. A row without a replacement drops harmless
tensors, and the report lists them. The names are those of the formats' own trainers and converters.
"""

import re
from dataclasses import dataclass

from weights.files.header import TensorEntry
from weights.files.reader import Reader
from weights.report import Log


@dataclass(frozen=True, slots=True)
class Row:
    pattern: str
    replacement: str | None
    origin: str


TABLE = "a table that old transformers saved"
MASK = "an attention mask that old transformers saved"
IGNORED = (
    Row(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", None, TABLE),
    Row(r"(^|\.)(masked_bias|attn\.bias)$", None, MASK),
)

TARGET_ROWS = (
    *IGNORED,
    Row(r"^model\.", "", "transformers"),
    Row(r"\.weight_scale_inv$", ".weight_scale", "the same scales by the name of quant_method fp8"),
)

WRAPPERS = r"^(?:(?:model|draft_model|eagle|eagle_module)\.)+"
VERIFIER = "the target's, kept by the speculators trainer"
LAYERNORMS = "speculators eagle, `layernorms`"
UNCONVERTED = "research checkpoints before speculators converted them"
SPECFORGE = "SpecForge's first DSpark heads"
FUSED = "a name that no MLP's gate has"
CODEBOOKS = "DFlash2's codebooks by the names of modules"
DRAFT_ROWS = (
    *IGNORED,
    Row(WRAPPERS, "", "wrappers of trainers and of vLLM"),
    Row(r"^verifier_(?:lm_head|norm)\.weight$", None, VERIFIER),
    Row(r"^midlayer\.", "layers.0.", "reference EAGLE-3, SpecForge, AngelSlim"),
    Row(r"^midlayers\.(\d+)\.", r"layers.\1.", "SGLang, several layers"),
    Row(r"^fusion_fc\.", "fc.", "speculators eagle"),
    Row(r"^transformer\.", "layers.0.", "speculators eagle"),
    Row(r"^(?:embedding_layernorm|embed_layernorm)\.", "embed_norm.", LAYERNORMS),
    Row(r"^hidden_layernorm\.", "layers.0.input_layernorm.", UNCONVERTED),
    Row(r"^(?:pre_lm_head_layernorm|lm_head_layernorm)\.", "norm.", LAYERNORMS),
    Row(r"^logit_head\.(markov_head|confidence_head)\.", r"\1.", SPECFORGE),
    Row(r"^markov_head\.(gate|joint)_proj\.", r"markov_head.\1.", FUSED),
    Row(r"^(candidate_selector\.\w+_codebook)\.weight$", r"\1", CODEBOOKS),
)

MIMO = "MiMo's own"
MTP_ROWS = (  # of a head among the target's tensors
    Row(r"^(?!model\.mtp_layers\.)", None, "the target's"),
    Row(r"^model\.mtp_layers\.(\d+)\.", r"layers.\1.", MIMO),
    Row(r"^layers\.0\.token_layernorm\.", "embed_norm.", MIMO),
    Row(r"^layers\.0\.hidden_layernorm\.", "feature_norm.", MIMO),
    Row(r"^layers\.0\.input_proj\.", "fc.", MIMO),
    Row(r"^layers\.0\.final_layernorm\.", "norm.", MIMO),
)


def rename(reader: Reader, rows: tuple[Row, ...], log: Log) -> dict[str, TensorEntry]:
    """The reader's entries by the names of this package; two that become one are a problem."""
    held: dict[str, TensorEntry] = {}
    for name, entry in reader.entries.items():
        new = _apply(name, rows, log.ignored)
        if new is None:
            continue
        if new in held:
            reader.problems.add(f"{entry.where} and {held[new].where} are both {new}")
        held[new] = entry
    return held


def _apply(name: str, rows: tuple[Row, ...], ignored: dict[str, str]) -> str | None:
    new = name
    for row in rows:
        if row.replacement is not None:
            new = re.sub(row.pattern, row.replacement, new)
        elif re.search(row.pattern, new):
            ignored[name] = row.origin
            return None
    return new
