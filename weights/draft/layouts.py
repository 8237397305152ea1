"""Which EAGLE format a checkpoint is, and what each format leaves unsaid: rows, tried in order.

Sources: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer, Tencent/AngelSlim,
deepseek-ai/DeepSpec, and the configs of their published heads. Kinds of drafts that are not built are recognised too
and refused by name, so that nobody reads a list of unexpected tensors instead.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from weights.errors import Problems
from weights.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a format is told by: config.json as written, the same with its wrappers opened, and the files' names."""

    raw: Mapping[str, object]
    flat: Mapping[str, object]
    names: frozenset[str]

    def has_name(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.names)

    def has_key(self, *keys: str) -> bool:
        return any(key in self.flat for key in keys)

    def is_speculators(self, *kinds: str) -> bool:
        return self.raw.get("speculators_model_type") in kinds

    def is_architecture(self, pattern: str) -> bool:
        named = self.raw.get("architectures")
        return (
            any(re.search(pattern, str(name)) for name in named)
            if isinstance(named, list)
            else False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format. The fields behind `is_it` are what its configs mean where they are silent or share a name.

    layer_ids:            its ids name the stream that enters a layer, or a layer's output (boundary - 1)
    norm_before_residual: where the key is absent
    final_norm_key:       the key that switches the norm before lm_head
    recycled_keys:        the keys that make the hidden be recycled after that norm
    recycles_norm:        it is recycled after that norm whenever there is one (EAGLE-1's head reads what it recycles)
    """

    name: str
    is_it: Callable[[Evidence], bool]
    layer_ids: Literal["boundary", "output"] = "boundary"
    norm_before_residual: bool = False
    final_norm_key: str = "use_last_layernorm"
    recycled_keys: tuple[str, ...] = ("norm_output", "return_hidden_post_norm")
    recycles_norm: bool = False


MIDLAYER = r"(^|\.)midlayers?\."
SPECFORGE_KEYS = (
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
    "rope_parameters",
)
MODELOPT_KEYS = (
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "next_layer_regular",
)

LAYOUTS = (
    Layout(name="speculators-eagle", is_it=lambda e: e.is_speculators("eagle"), recycles_norm=True),
    Layout(
        name="speculators-eagle3",
        is_it=lambda e: e.is_speculators("eagle3"),
        norm_before_residual=True,
    ),
    Layout(name="deepspec", is_it=lambda e: e.is_architecture(r"Eagle3Model$"), layer_ids="output"),
    Layout(
        name="angelslim",
        is_it=lambda e: (
            e.has_name(MIDLAYER)
            and (e.is_architecture("^Eagle3LlamaForCausalLM$") or e.has_key("target_model_type"))
        ),
    ),
    Layout(name="modelopt", is_it=lambda e: e.has_key(*MODELOPT_KEYS), layer_ids="output"),
    Layout(
        # norm_output means another thing here than everywhere else: a norm before lm_head (default: there is one)
        name="specforge",
        is_it=lambda e: e.has_name(MIDLAYER) and e.has_key(*SPECFORGE_KEYS),
        layer_ids="output",
        final_norm_key="norm_output",
        recycled_keys=(),
    ),
    Layout(
        name="eagle-1-vllm", is_it=lambda e: e.raw.get("model_type") == "eagle" and "model" in e.raw
    ),
    Layout(name="eagle-3", is_it=lambda e: e.has_name(r"hidden_norm\.weight$")),
    Layout(name="eagle-1", is_it=lambda e: e.has_name(r"(^|\.)fc\.weight$")),
)

REFUSED: tuple[tuple[str, Callable[[Evidence], bool]], ...] = (
    (
        "P-EAGLE (parallel drafting)",
        lambda e: e.is_speculators("peagle") or e.has_name(r"(^|\.)mask_hidden$"),
    ),
    (
        "DFlash",
        lambda e: (
            e.is_speculators("dflash", "dflash2")
            or e.is_architecture("DFlash")
            or "dflash_config" in e.raw
        ),
    ),
    (
        "DSpark",
        lambda e: (
            e.is_speculators("dspark")
            or e.is_architecture("(?i)dspark")
            or e.has_name(r"markov_head\.")
        ),
    ),
    (
        "EagleMedusa (parallel draft heads)",
        lambda e: (
            e.has_name(r"parallel_draft_heads\.") or e.flat.get("parallel_draft_step", 1) != 1
        ),
    ),
    (
        "MTP (multi-token prediction)",
        lambda e: (
            e.is_speculators("mtp", "fastmtp")
            or e.has_name(r"(eh_proj|enorm|hnorm|shared_head\.\w+)\.weight$")
        ),
    ),
    (
        "an MLA draft (latent attention)",
        lambda e: (
            e.has_name(r"self_attn\.(kv_a_proj|q_a_proj)") or e.is_architecture("Eagle3?Deepseek")
        ),
    ),
    (
        "GRIFFIN (token-guided fusion)",
        lambda e: e.is_architecture("(?i)griffin") or e.has_name("(?i)griffin|token_guided"),
    ),
    ("Medusa", lambda e: e.has_name(r"medusa_heads?\.") or e.is_architecture("Medusa")),
    ("a mixture-of-experts draft", lambda e: e.has_name(r"mlp\.(experts|router|gate\.weight)")),
    ("a draft with attention sinks", lambda e: e.has_name(r"self_attn\.sinks$")),
    ("a draft of the Gemma family (scaled embedding)", lambda e: e.is_architecture("^Gemma")),
)

# keys that change the arithmetic -> the only value that is built
ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "quantization_config": None,
    "logit_scale": 1.0,
    "eh_proj_before_attn": False,
    "final_logit_softcapping": None,
}


def find_layout(evidence: Evidence, problems: Problems) -> Layout | None:
    """The format, or None with a problem that names what it is instead."""
    for kind, is_it in REFUSED:
        if is_it(evidence):
            problems.add(
                f"config.json and tensor names: this is {kind}, which is not supported", fatal=True
            )
            return None
    layout = next((layout for layout in LAYOUTS if layout.is_it(evidence)), None)
    speculator = evidence.raw.get("speculators_model_type")
    if speculator is not None and (layout is None or not layout.name.startswith("speculators")):
        problems.add(
            f"config.json: speculators_model_type {speculator!r} is not supported, only eagle, eagle3",
            fatal=True,
        )
    elif layout is None:
        problems.add(
            "no EAGLE draft: no fc.weight, no hidden_norm, and config.json names no known format",
            fatal=True,
        )
    return layout


def refuse_values(fields: Fields, problems: Problems) -> None:
    for key, value in ONLY.items():
        if key in fields and fields.values[key] != value:
            problems.add(f"{fields.source(key)} {fields.values[key]!r:.80} is not supported")
