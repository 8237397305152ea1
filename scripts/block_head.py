"""Heads of random weights that propose in parallel, beside a pair of scripts/random_pair.py.

Sizes and options are those of published heads: 5 layers like the target's, 5 taps, and for DSpark
blocks of 7 and a vanilla markov head of rank 256 with its confidence head (deepseek-ai/DeepSpec),
for DFlash blocks of 16 and for DFlash2 of 8, with groups of 16 channels and 16 candidates of a
selector of rank 256 (z-lab/dflash). A P-EAGLE head is the pair's EAGLE-3 head with 4 layers.
"""

import json
from pathlib import Path

from safetensors import safe_open

from scripts.random_pair import Config, write_files
from weights.config import LayerKind
from weights.draft.config import BlockConfig
from weights.draft.layer import resolve_layer
from weights.draft.sources import Sources
from weights.errors import Problems
from weights.fields import Fields
from weights.report import Log
from weights.shapes import Shapes, draft_shapes

NUM_LAYERS, NUM_TAPS = 5, 5
PARALLEL_LAYERS = 4
KINDS = {
    "dflash": {"block_size": 16, "anchor_proposes": False},
    "dspark": {
        **{"block_size": 7, "anchor_proposes": True},
        **{"markov": "vanilla", "markov_rank": 256, "confidence": "markov"},
    },
    "dflash2": {
        **{"block_size": 8, "anchor_proposes": False},
        **{"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    },
}


def write_block_head(out: Path, kind: str, target: Path) -> None:
    """Write a head of this kind for the target in a directory; its weights take no space."""
    keys: Config = json.loads((target / "config.json").read_text())
    L, V = int(str(keys["num_hidden_layers"])), int(str(keys["vocab_size"]))
    layer = _layer(keys)
    taps = tuple(round(2 + i * (L - 4) / (NUM_TAPS - 1)) for i in range(NUM_TAPS))
    config = BlockConfig(
        format=kind,
        layer=layer,
        num_layers=NUM_LAYERS,
        vocab_size=V,
        draft_vocab_size=V,
        target_hidden_size=layer.hidden_size,
        max_position_embeddings=int(str(keys["max_position_embeddings"])),
        aux_boundaries=taps,
        mask_token_id=V - 1,
        **KINDS[kind],  # type: ignore[arg-type]
    )
    options: Config = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [boundary - 1 for boundary in taps],
        "block_size": config.block_size,
    }
    if kind == "dspark":
        options |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        options |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        names = {"architectures": ["Qwen3DSparkModel"], **options}
    else:
        if kind == "dflash2":
            of_selector = ("conv_group_size", "selector_rank", "selector_top_k")
            options |= {key: getattr(config, key) for key in of_selector}
        architecture = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[kind]
        names = {"architectures": [architecture], "dflash_config": options}
    own: Config = {"num_hidden_layers": NUM_LAYERS, **names}
    write_files(out, keys | own, draft_shapes(config))


def write_parallel_head(out: Path, eagle3: Path) -> None:
    """Write a P-EAGLE head from the EAGLE-3 head in a directory; its weights take no space."""
    keys: Config = json.loads((eagle3 / "config.json").read_text())
    with safe_open(eagle3 / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    D = int(str(keys["hidden_size"]))
    found: Shapes = {"mask_hidden": (1, 1, shapes["fc.weight"][1])}
    for name, shape in shapes.items():
        found[name.replace("midlayer.", "layers.0.")] = shape
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            reads_pair = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            for i in range(1, PARALLEL_LAYERS):
                further = (shape[0], D) if reads_pair else shape
                found[name.replace("midlayer.", f"layers.{i}.")] = further
    mask: Config = {"ptd_token_id": int(str(keys["vocab_size"])) - 1}
    write_files(out, keys | {"num_hidden_layers": PARALLEL_LAYERS, **mask}, found)


def _layer(keys: Config) -> LayerKind:
    """The target's layer, with the norms over heads that these kinds have."""
    fields = Fields(keys | {"quantization_config": None}, "config.json", Problems(Path()))
    found = Sources(held={}, fields=fields, target=None, aux_layers=None, log=Log())
    layer = resolve_layer(found)
    fields.problems.raise_if_any()
    return LayerKind(
        **{name: getattr(layer, name) for name in LayerKind.__slots__} | {"qk_norm": True}
    )
