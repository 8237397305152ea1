"""The matrix products that a target and its draft ask for, each shape once: what tuning measures.

The modules are built from the configs, without memory, and say what weights there are. A test
compares this with what they call. No table knows experts and their router: a rule cuts them.
"""

import torch
from torch import nn

from specdec.kernels.tile_shapes import FP8, Kind, Product
from specdec.models.block import BlockModel
from specdec.models.decoder import DecoderModel
from specdec.models.eagle import EagleModel
from weights.config import TargetConfig
from weights.draft.config import BlockConfig, DraftConfig

KINDS: dict[str, Kind] = {  # by the module that has the weight
    **{"qkv_proj": "split", "o_proj": "split", "gate_up_proj": "gate", "down_proj": "split"},
    **{"fc": "whole", "lm_head": "whole", "markov_w2": "whole"},
    **{"kernel_projection": "whole", "hidden_projection": "whole"},
}


def experts_of(target: TargetConfig) -> str | None:
    """Describe a target's experts, which kernels/experts/ cuts; None: it has none."""
    if (experts := target.experts) is None:
        return None
    sizes = f"{target.hidden_size}x{experts.width}"
    return f"{experts.num} experts of {sizes}, {experts.per_token} a row"


def products_of(target: TargetConfig, draft: DraftConfig | None, dtype: str) -> list[Product]:
    """List the products in the order of a pass. dtype: of weights that are not FP8, "bfloat16"."""
    with torch.device("meta"):
        rope = torch.empty(0), torch.empty(0)
        models: list[nn.Module] = [DecoderModel(target, {each.rope: rope for each in target.kinds})]
        if isinstance(draft, BlockConfig):
            models.append(BlockModel(draft, rope))
        elif draft is not None:
            models.append(EagleModel(draft, rope))
    found: dict[Product, None] = {}
    for model in models:
        for name, weight in model.named_parameters():
            *_, owner, tensor = name.split(".")
            if owner in KINDS and tensor == "weight":
                N, K = weight.shape
                is_fp8 = weight.dtype == torch.float8_e4m3fn
                found[Product(KINDS[owner], N, K, FP8 if is_fp8 else dtype)] = None
    if draft is not None and (width := draft.context_width):
        found[Product("split", width, draft.layer.hidden_size, dtype)] = None
    return list(found)
