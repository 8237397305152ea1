"""Targets that transformers saves have its logits and tokens, whatever the chunks and drafts."""

import dataclasses
from functools import cache

import pytest
import torch

from specdec.kernels.experts.route import route
from specdec.models.build import build_draft, build_target
from specdec.sizes import TreeShape
from tests.specdec.models.written import tokens_of, written
from tests.specdec.tiny_pair import random_draft
from tests.weights.published import TARGETS, logits_of, save
from tests.weights.tiny import eagle3_config
from weights import load_target

PROMPTS = [[50], [(37 * i + 11) % 96 for i in range(23)], [(29 * i + 5) % 96 for i in range(70)]]
NUM_TOKENS = 64
# they show what the others do, or test_windows.py
SLOW = "qwen3_moe, every second", "mixtral", "mistral, windows", "qwen2, later windows"
EACH = [
    *("qwen3_moe, a dense layer", "granitemoe"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW[:2]),
]
LOGITS = 2e-4  # how far float32 sums in another order may be apart


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """target(name): the model of transformers, and what we load of its files."""

    @cache
    def build(name):
        directory = tmp_path_factory.mktemp("target")
        model = save(name, directory)
        return model, load_target(directory, progress=False)

    return build


def difference(model, loaded, prompt, num_tokens=NUM_TOKENS):
    """The largest difference of logits, with tokens that are the best where it is clear."""
    text = written(loaded, prompt, num_tokens)
    expected_NV = logits_of(model, prompt + text.tokens[:-1])[len(prompt) - 1 :]
    best_N2, id_N2 = expected_NV.topk(2)
    is_clear_N = best_N2[:, 0] - best_N2[:, 1] > 2 * LOGITS
    assert len(set(text.tokens)) >= num_tokens / 4, "a dull target: choose another seed"
    largest = float((text.logits_NV - expected_NV).abs().max())
    if largest <= LOGITS:
        assert torch.equal(torch.tensor(text.tokens)[is_clear_N], id_N2[:, 0][is_clear_N])
    return largest


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TARGETS],
)
def test_logits_and_tokens_are_those_of_transformers(target, name):
    model, loaded = target(name)
    for prompt in PROMPTS:
        assert difference(model, loaded, prompt) <= LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("name", [EACH[0], "granitemoe", "granite", *SLOW])
def test_drafts_chunks_and_neighbours_change_no_token(target, name):
    _, loaded = target(name)
    eagle = random_draft(eagle3_config(loaded, head_dim=loaded.config.heads.head_dim))
    alone = [written(loaded, prompt, 24).tokens for prompt in PROMPTS]
    assert tokens_of(loaded, None, PROMPTS, 24, chunk=7) == alone
    assert tokens_of(loaded, eagle, PROMPTS, 24, chunk=512) == alone
    tree = TreeShape(num_levels=3, top_k=4, num_nodes=10)
    assert tokens_of(loaded, eagle, PROMPTS, 24, chunk=512, tree=tree) == alone


@pytest.mark.parametrize("has_own_head", [False, True])
def test_a_borrowed_head_has_the_factor_of_the_targets_logits(target, has_own_head):
    _, loaded = target("granite")
    config = eagle3_config(loaded, head_dim=loaded.config.heads.head_dim)
    if not has_own_head:
        V = loaded.config.vocab_size
        config = dataclasses.replace(config, has_own_head=False, draft_vocab_size=V, has_d2t=False)
    device = torch.device("cpu")
    model = build_target(loaded, config.aux_boundaries, 64, device)
    draft = build_draft(random_draft(config), model, 64, device)
    assert draft.logits_factor == (1.0 if has_own_head else 1 / 3)


def lose_renormalising(loaded):
    return with_experts(loaded, renormalise=not loaded.config.layers[-1].experts.renormalise)


def lose_an_expert(loaded):
    return with_experts(loaded, per_token=loaded.config.layers[-1].experts.per_token - 1)


def zero_one_down_proj(loaded):
    name = "layers.1.mlp.experts.down_proj"
    down = loaded.tensors[name].clone()
    down[4] = 0
    return dataclasses.replace(loaded, tensors=loaded.tensors | {name: down})


def swap_gate_and_up(loaded):
    name = "layers.1.mlp.experts.gate_up_proj"
    gate, up = loaded.tensors[name].chunk(2, dim=1)
    return dataclasses.replace(loaded, tensors=loaded.tensors | {name: torch.cat([up, gate], 1)})


def with_experts(loaded, **changes):
    layers = tuple(
        kind
        if kind.experts is None
        else dataclasses.replace(kind, experts=dataclasses.replace(kind.experts, **changes))
        for kind in loaded.config.layers
    )
    config = dataclasses.replace(loaded.config, layers=layers)
    return dataclasses.replace(loaded, config=config)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "lose", [lose_renormalising, lose_an_expert, zero_one_down_proj, swap_gate_and_up]
)
def test_what_is_lost_of_experts_shows_in_the_logits(target, name, lose):
    model, loaded = target(name)
    assert difference(model, lose(loaded), PROMPTS[1], 4) > 10 * LOGITS


@pytest.mark.parametrize("name", EACH)
def test_weights_that_are_all_alike_show_in_the_logits(target, name, monkeypatch):
    model, loaded = target(name)

    def alike(*args):
        found = route(*args)
        return found._replace(weights_TS=torch.full_like(found.weights_TS, 1 / 3))

    monkeypatch.setattr("specdec.models.experts.route", alike)
    assert difference(model, loaded, PROMPTS[1], 4) > 10 * LOGITS


@pytest.mark.parametrize("name", ["granite", "granitemoe"])
@pytest.mark.parametrize("multiplier", ["attention", "residual", "embedding", "logits"])
def test_a_multiplier_that_is_lost_shows_in_the_logits(target, name, multiplier):
    model, loaded = target(name)
    lost = {
        "attention": {"attention_scale": None},
        "residual": {"residual_multiplier": 1.0},
        "embedding": {"embedding_multiplier": 1.0},
        "logits": {"logits_scaling": 1.0},
    }[multiplier]
    config = loaded.config
    if multiplier in ("attention", "residual"):
        layers = tuple(dataclasses.replace(kind, **lost) for kind in config.layers)
        lost = {"layers": layers}
    broken = dataclasses.replace(loaded, config=dataclasses.replace(config, **lost))
    assert difference(model, broken, PROMPTS[1], 4) > 10 * LOGITS
