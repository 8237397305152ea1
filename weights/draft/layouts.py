"""Which format a draft's checkpoint is, and what each format leaves unsaid: rows, tried in order.

Sources: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer,
Tencent/AngelSlim, deepseek-ai/DeepSpec, z-lab/dflash, and the configs of their published heads.
Drafts of other kinds are refused by name: better than a list of unexpected tensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from weights.errors import Problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What tells a format: config.json, the same with its wrappers opened, and tensor names."""

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
        return isinstance(named, list) and any(re.search(pattern, str(name)) for name in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format; the fields after `is_it` say what its configs mean where they are silent."""

    name: str
    is_it: Callable[[Evidence], bool]
    layer_ids: Literal["boundary", "output"] = "boundary"  # the stream entering it, or leaving it


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Format):
    """A format of EAGLE heads."""

    norm_before_residual: bool = False  # if the key is absent
    final_norm_key: str = "use_last_layernorm"  # switches the norm before lm_head
    # make the draft recycle its hidden after that norm
    recycled_keys: tuple[str, ...] = ("norm_output", "return_hidden_post_norm")
    recycles_norm: bool = False  # always after that norm, if any (EAGLE-1's head reads the same)
    is_parallel: bool = False  # P-EAGLE
    is_inside: bool = False  # among the target's tensors, with the target's config (MTP)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(Format):
    """A format of drafts that propose a block."""

    block_size: int | None = None  # None: the config must say it
    anchor_proposes: bool = False
    markov_rank: int = 0
    has_confidence: bool | None = None  # None: by the tensor
    # DFlash2: the numbers that its configs may leave out; None: no convolutions and no selector
    selector: Mapping[str, int] | None = None
    spreads_taps: bool = (
        False  # ids that are not given lie evenly between the first layers and last
    )


MIDLAYER = r"(^|\.)midlayers?\."
SPECFORGE_KEYS = (
    *("eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "target_hidden_size"),
    "rope_parameters",
)
MODELOPT_KEYS = (
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    "next_layer_regular",
)


MASK_KEYS = ("ptd_token_id", "pard_token")  # the mask token of P-EAGLE heads that vLLM serves


def _is_peagle(e: Evidence) -> bool:
    return e.has_name(r"(^|\.)mask_hidden$") or e.has_key(*MASK_KEYS)


def _is_angelslim(e: Evidence) -> bool:
    is_named = e.is_architecture("^Eagle3LlamaForCausalLM$") or e.has_key("target_model_type")
    return is_named and e.has_name(MIDLAYER)


LAYOUTS = (
    Layout(
        name="mimo-mtp",
        is_it=lambda e: e.has_name(r"^model\.mtp_layers\.0\.input_proj\.weight$"),
        recycles_norm=True,
        is_inside=True,
    ),
    Layout(name="speculators-eagle", is_it=lambda e: e.is_speculators("eagle"), recycles_norm=True),
    Layout(
        name="speculators-eagle3",
        is_it=lambda e: e.is_speculators("eagle3"),
        norm_before_residual=True,
    ),
    Layout(name="speculators-peagle", is_it=lambda e: e.is_speculators("peagle"), is_parallel=True),
    Layout(name="p-eagle", is_it=_is_peagle, is_parallel=True),
    Layout(name="deepspec", is_it=lambda e: e.is_architecture(r"Eagle3Model$"), layer_ids="output"),
    Layout(name="angelslim", is_it=_is_angelslim),
    Layout(name="modelopt", is_it=lambda e: e.has_key(*MODELOPT_KEYS), layer_ids="output"),
    Layout(
        # only here norm_output means a norm before lm_head (default: there is one)
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


def _has_projector(kind: str) -> Callable[[Evidence], bool]:
    return lambda e: e.flat.get("projector_type") == kind


BLOCK_LAYOUTS = (
    BlockLayout(
        name="speculators-dflash", is_it=lambda e: e.is_speculators("dflash"), block_size=8
    ),
    BlockLayout(
        name="speculators-dspark",
        is_it=lambda e: e.is_speculators("dspark"),
        block_size=8,
        anchor_proposes=True,
        markov_rank=256,
        has_confidence=True,
    ),
    BlockLayout(
        name="speculators-dflash2",
        is_it=lambda e: e.is_speculators("dflash2"),
        block_size=8,
        selector={"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    ),
    BlockLayout(
        # with markov_rank 0 this is its "DFlash", whose anchor proposes all the same
        name="deepspec-dspark",
        is_it=lambda e: e.is_architecture(r"(?<!^)DSparkModel$"),
        layer_ids="output",
        anchor_proposes=True,
    ),
    BlockLayout(
        name="specforge-dspark",
        is_it=lambda e: e.is_architecture("^DSparkDraftModel$") or _has_projector("dspark")(e),
        layer_ids="output",
        anchor_proposes=True,
        spreads_taps=True,
    ),
    BlockLayout(
        name="dflash2",
        is_it=lambda e: e.is_architecture("^DFlash2DraftModel$"),
        layer_ids="output",
        block_size=16,
        selector={},
    ),
    BlockLayout(
        name="dflash",
        is_it=lambda e: e.is_architecture("^DFlashDraftModel$") or "dflash_config" in e.raw,
        layer_ids="output",
        block_size=16,
        spreads_taps=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What gives a kind of draft away, any one of them: architecture and tensor are patterns."""

    speculators: tuple[str, ...] = ()
    architecture: str | None = None
    tensor: str | None = None
    config: Callable[[Evidence], bool] = lambda e: False

    def fit(self, e: Evidence) -> bool:
        return (
            e.is_speculators(*self.speculators)
            or self.config(e)
            or (self.architecture is not None and e.is_architecture(self.architecture))
            or (self.tensor is not None and e.has_name(self.tensor))
        )


MTP = r"(eh_proj|enorm|hnorm|shared_head\.\w+)\.weight$"
MLA = r"self_attn\.(kv_a_proj|q_a_proj)"
REFUSED = {
    "Domino": Signs(
        architecture="Domino",
        tensor=r"(^|\.)(prefix_gru|embed_proj)\.",
        config=_has_projector("domino"),
    ),
    "a block draft whose mask has an embedding of its own": Signs(tensor=r"(^|\.)mask_embedding"),
    "EagleMedusa (parallel draft heads)": Signs(
        tensor=r"parallel_draft_heads\.",
        config=lambda e: e.flat.get("parallel_draft_step", 1) != 1,
    ),
    "MTP (multi-token prediction)": Signs(speculators=("mtp", "fastmtp"), tensor=MTP),
    "an MLA draft (latent attention)": Signs(
        speculators=("dsv4_dspark",),
        architecture="Eagle3?Deepseek|(?i:deepseek.*(dspark|dflash))",
        tensor=MLA,
        config=lambda e: e.flat.get("attention_mode") == "mla",
    ),
    "GRIFFIN (token-guided fusion)": Signs(
        architecture="(?i)griffin", tensor="(?i)griffin|token_guided"
    ),
    "Medusa": Signs(architecture="Medusa", tensor=r"medusa_heads?\."),
    "a mixture-of-experts draft": Signs(tensor=r"mlp\.(experts|router|gate\.weight)"),
    "a draft with attention sinks": Signs(tensor=r"self_attn\.sinks$"),
    "a draft of the Gemma family (scaled embedding)": Signs(architecture="^Gemma"),
}

# keys that change the computation -> the only value that is built
ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "quantization_config": None,
    "logit_scale": 1.0,
    "eh_proj_before_attn": False,
    "final_logit_softcapping": None,
}


# the same of block drafts, each with what another value would mean
ONLY_OF_BLOCKS: dict[str, tuple[object, str]] = {
    "is_causal": (False, "a block whose rows, or some heads of them, are causal"),
    "causal": (False, "a block whose rows are causal"),
    "use_swa": (False, "a block draft with windows"),
    "use_sliding_window": (False, "a block draft with windows"),
    "attention_sink_bias": (False, "a block draft with attention sinks"),
    "attention_modes": (None, "a block draft with latent or linear attention"),
    "attention_mode": ("gqa", "a block draft with latent or linear attention"),
    "input_embedding_scale": (1.0, "a block draft that scales its embedding"),
    "output_multiplier": (1.0, "a block draft that scales its logits"),
    "conv_kernel_size": (2, "a convolution of another number of taps"),
}
# its model types that are supported
SPECULATORS = ("eagle", "eagle3", "peagle", "dflash", "dspark", "dflash2")


def find_layout(evidence: Evidence, problems: Problems) -> Layout | BlockLayout | None:
    """Find the format; or None, with a problem that names what it is instead."""
    refused = next((kind for kind, signs in REFUSED.items() if signs.fit(evidence)), None)
    if refused is not None:
        line = f"config.json and tensor names: this is {refused}, which is not supported"
        problems.add(line, fatal=True)
        return None
    layouts: tuple[Layout | BlockLayout, ...] = (*BLOCK_LAYOUTS, *LAYOUTS)
    layout = next((layout for layout in layouts if layout.is_it(evidence)), None)
    kind = evidence.raw.get("speculators_model_type")
    if kind is not None and (layout is None or not layout.name.startswith("speculators")):
        line = f"speculators_model_type {kind!r} is not supported, only {', '.join(SPECULATORS)}"
        problems.add(f"config.json: {line}", fatal=True)
    elif layout is None:
        line = "no fc.weight, no hidden_norm, and config.json names no known format"
        problems.add(f"no known draft: {line}", fatal=True)
    return layout
