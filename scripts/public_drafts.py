"""Do the block drafts that speculators trains and writes compute here what they do there?

    pip install speculators==0.9.0 && python -m scripts.public_drafts  # where specdec is installed

Lets that package draw and write small drafts, reads the files as the engine does, and compares
logits and confidences of a block behind contexts of several lengths with tests/naive_block.py, with
which the suite compares ours. Exit code 1 if numbers differ by over 2e-5 of the largest.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel as DFlash
from speculators.models.dflash import core
from speculators.models.dflash2 import DFlash2DraftModel as DFlash2
from speculators.models.dspark import DSparkDraftModel as DSpark
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config

from tests.naive_block import propose, read_draft
from tests.weights.tiny import tiny_target
from weights import load_eagle

TARGET = tiny_target("qwen3")
V, D = TARGET.config.vocab_size, TARGET.config.hidden_size
TAPS, BLOCK = [1, 3, 5], 6
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [  # of a draft, and of its layers
    (DFlash, {}, {}),
    (DFlash, {"draft_vocab_size": 50}, {}),
    (DFlash, {"sample_from_anchor": True}, {"attention_bias": True}),
    *((DSpark, {"markov_rank": 8, "markov_head_type": kind}, {}) for kind in ("vanilla", "gated")),
    (DSpark, {"draft_vocab_size": 50, "markov_head_type": "rnn"}, {}),
    (DFlash2, {"selector_rank": 8, "selector_top_k": 5}, {}),
]


def draw(model_class: Any, options: dict[str, Any], layer: dict[str, Any]) -> Any:
    """Make a draft of the package in which every part matters."""
    fields = model_class.config_class.model_fields
    sizes = {"hidden_size": D, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    inner = Qwen3Config(vocab_size=V, intermediate_size=80, num_hidden_layers=2, **sizes, **layer)
    inner._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    how = {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    spec = SpeculatorsConfig(
        algorithm=fields["speculators_model_type"].default, verifier=verifier, **how
    )
    block = {"block_size": BLOCK, "mask_token_id": V - 1, "aux_hidden_state_layer_ids": TAPS}
    given = {"draft_vocab_size": V, **block, **options, "speculators_config": spec}
    model = model_class(model_class.config_class(transformer_layer_config=inner, **given)).eval()
    for name, weight in model.named_parameters():
        scale, mean = (0.2, 1.0) if "norm" in name else (2 / math.sqrt(weight.shape[-1]), 0.0)
        weight.data.normal_(mean, scale)
    if (W := given["draft_vocab_size"]) < V:
        is_known = torch.randperm(V) < W
        model.load_vocab_mappings(is_known, is_known.nonzero()[:, 0] - torch.arange(W))
    return model


@torch.no_grad()
def difference(model: Any, directory: Path, context: int) -> float:
    """Draft behind so many tokens; give the largest difference, as a part of the largest number."""
    ids = torch.randint(0, V - 1, (1, context + 1 + BLOCK))
    features, tokens = torch.randn(1, ids.shape[1], len(TAPS) * D), ids[0, : context + 1].tolist()
    cfg, weights = read_draft(directory, TARGET.config.num_layers)
    weights.setdefault("embed_tokens.weight", model.embed_tokens.weight)  # the target's
    weights.setdefault("lm_head.weight", model.lm_head.weight)
    first = 0 if model.config.sample_from_anchor else 1
    ours = propose(cfg, weights, tokens, features[0, :context], BLOCK - first)
    core.select_anchors = lambda *_: (torch.tensor([context]), torch.tensor([True]))
    given = features, ids, torch.ones_like(ids), features[..., :D], torch.zeros_like(ids)
    hidden, logits, *_ = model._backbone_forward(*given, max_anchors=1)
    before = torch.tensor([[tokens[-1]] * (1 + first) + ours.tokens])[:, :BLOCK]
    logits, confidences = with_heads(model, hidden, logits, before)
    pairs = (logits, ours.logits_KW), (confidences, torch.tensor(ours.confidences))
    worst = 0.0
    for public, own in pairs[: 2 if ours.confidences else 1]:
        apart = torch.where(public[0, first:] == own, 0.0, public[0, first:] - own)  # -inf too
        worst = max(worst, float(apart.abs().max() / own[own.isfinite()].abs().max()))
    return worst


def with_heads(model: Any, hidden: Tensor, logits: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Add what the heads say of the tokens before a block's drafts; also give confidences."""
    read, confidences = hidden, logits
    if selector := getattr(model, "candidate_selector", None):
        ids, scores = selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, scores)
    if head := getattr(model, "markov_head", None):
        logits = logits + head.block_bias(prev_token_ids=before, hidden_states=hidden)
        if model.config.confidence_head_with_markov:
            read = torch.cat([hidden, head.prev_embeddings(before)], dim=-1)
    if head := getattr(model, "confidence_head", None):
        confidences = head(read).sigmoid()
    return logits, confidences


def main() -> None:
    torch.manual_seed(0)
    differences = []
    for model_class, options, layer in CASES:
        model = draw(model_class, options, layer)
        with tempfile.TemporaryDirectory() as name:
            model.save_pretrained(name)
            load_eagle(Path(name), TARGET, progress=False)  # the engine's reader takes it too
            found = [difference(model, Path(name), n) for n in (1, 2, 63, 64, 65, 200)]
            differences.append(max(found))
        print(f"{differences[-1]:.1e}  {model_class.__name__}", options | layer, flush=True)
    raise SystemExit(max(differences) > 2e-5)


if __name__ == "__main__":
    main()
