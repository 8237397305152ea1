"""Which EAGLE format a checkpoint is, and what each format leaves unsaid: rows, tried in order.

Sources: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer (modelopt.torch.speculative),
Tencent/AngelSlim, deepseek-ai/DeepSpec, and the configs of their published heads. Kinds of drafts that are not built are
recognised here too and refused by name, so that nobody reads a list of unexpected tensors instead.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from weights.errors import Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a format is told by: config.json as written, the same with its wrappers opened, and the files' names."""

    raw: Mapping[str, object]
    flat: Mapping[str, object]
    names: frozenset[str]

    def has_name(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.names)

    def is_speculators(self, *kinds: str) -> bool:
        return str(self.raw.get("speculators_model_type")) in kinds

    def is_architecture(self, pattern: str) -> bool:
        named = self.raw.get("architectures")
        return any(re.search(pattern, str(name)) for name in named) if isinstance(named, list) else False

    def number(self, key: str) -> int:
        value = self.flat.get(key)
        return value if type(value) is int else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format. The fields behind `is_it` are what its configs mean where they are silent or share a name.

    layer_ids:            whether its ids name the stream entering a layer, or a layer's output (+1)
    norm_output:          what that key says: which hidden is recycled, or whether a norm precedes the head
    norm_before_residual: where the key is absent
    recycles_norm:        a final norm, where there is one, comes before the recycling (EAGLE-1's head reads what it recycles)
    """

    name: str
    is_it: Callable[[Evidence], bool]
    layer_ids: Literal["boundary", "output"] = "boundary"
    norm_output: Literal["recycled", "final_norm"] = "recycled"
    norm_before_residual: bool = False
    recycles_norm: bool = False


SPECFORGE_KEYS = ("eagle_config", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "rope_parameters")
MODELOPT_KEYS = (
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "next_layer_regular",
)

LAYOUTS = (
    Layout(name="speculators-eagle", is_it=lambda e: e.is_speculators("eagle"), recycles_norm=True),
    Layout(name="speculators-eagle3", is_it=lambda e: e.is_speculators("eagle3"), norm_before_residual=True),
    Layout(name="deepspec", is_it=lambda e: e.is_architecture(r"Eagle3Model$"), layer_ids="output"),
    Layout(
        name="angelslim",
        is_it=lambda e: (
            "target_model_type" in e.flat or (e.is_architecture("^Eagle3LlamaForCausalLM$") and e.has_name("^midlayer"))
        ),
    ),
    Layout(
        name="modelopt",
        is_it=lambda e: any(key in e.flat for key in MODELOPT_KEYS),
        layer_ids="output",
    ),
    Layout(
        name="specforge",
        is_it=lambda e: (
            e.has_name(r"(^|\.)midlayer\.") and (any(k in e.raw for k in SPECFORGE_KEYS) or e.has_name(r"fc_norm\."))
        ),
        layer_ids="output",
        norm_output="final_norm",
    ),
    Layout(
        name="eagle-1-vllm", is_it=lambda e: e.raw.get("model_type") == "eagle" and isinstance(e.raw.get("model"), dict)
    ),
    Layout(name="eagle-3", is_it=lambda e: e.has_name(r"hidden_norm\.")),
    Layout(name="eagle-1", is_it=lambda e: e.has_name(r"(^|\.)fc\.weight$")),
)

# (what it is, how it is told)
REFUSED: tuple[tuple[str, Callable[[Evidence], bool]], ...] = (
    ("P-EAGLE (parallel drafting)", lambda e: e.is_speculators("peagle") or e.has_name(r"(^|\.)mask_hidden$")),
    (
        "DFlash",
        lambda e: e.is_speculators("dflash", "dflash2") or e.is_architecture("DFlash") or "dflash_config" in e.raw,
    ),
    ("DSpark", lambda e: e.is_speculators("dspark") or e.is_architecture("(?i)dspark") or e.has_name(r"markov_head\.")),
    (
        "EagleMedusa (parallel draft heads)",
        lambda e: e.has_name(r"parallel_draft_heads\.") or e.number("parallel_draft_step") > 1,
    ),
    (
        "MTP (multi-token prediction)",
        lambda e: e.is_speculators("mtp", "fastmtp") or e.has_name(r"(eh_proj|enorm|hnorm|shared_head\.\w+)\."),
    ),
    (
        "MLA (latent attention in the draft)",
        lambda e: e.has_name(r"kv_a_proj") or e.is_architecture(r"Eagle3?Deepseek"),
    ),
    (
        "GRIFFIN (token-guided fusion)",
        lambda e: e.is_architecture("(?i)griffin") or e.has_name(r"(?i)token_guided|griffin"),
    ),
    ("Medusa", lambda e: e.has_name(r"medusa_heads?\.") or e.is_architecture("Medusa")),
    ("a mixture of experts in the draft", lambda e: e.has_name(r"mlp\.(experts|gate\.weight|router)")),
    ("attention sinks in the draft", lambda e: e.has_name(r"self_attn\.sinks$")),
)


def find_layout(evidence: Evidence, problems: Problems) -> Layout | None:
    """The format, or None with a problem that names what it is instead."""
    for kind, is_it in REFUSED:
        if is_it(evidence):
            problems.add(f"config.json: this is {kind}, which is not supported")
            return None
    layout = next((layout for layout in LAYOUTS if layout.is_it(evidence)), None)
    if layout is None:
        problems.add("no EAGLE draft: neither fc.weight nor a hidden_norm, and config.json names no known format")
    return layout
