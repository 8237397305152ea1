"""A tiny gpt-oss has the logits and tokens of transformers, in both forms and whatever the drafts.

Six layers, every second with a window of 24; sinks; 9 experts, 4 a row; a limit that clamps; yarn,
whose original length prompts and texts leave behind.
"""

import dataclasses
from functools import cache

import pytest
import torch

from specdec.kernels.experts import mlp
from specdec.kernels.invariant import blocked_exp
from tests.specdec.models.written import tokens_of, written
from tests.specdec.tiny_pair import random_draft
from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import logits_of, save
from tests.weights.tiny import eagle3_config
from weights import load_target

LENGTHS = (1, 23, 24, 25, 64, 70)
PROMPTS = [[(37 * i + 11 * n) % 96 for i in range(n)] for n in LENGTHS]
LOGITS = 2e-4  # how far float32 sums in another order may be apart
SEED = 2  # of weights whose texts are not dull


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return save("gpt_oss", directory, SEED), directory


@pytest.fixture(scope="module")
def target(saved):
    """The model of transformers, and what we load of its files."""
    model, directory = saved
    return model, load_target(directory, progress=False)


@pytest.fixture(scope="module")
def alone(target):
    """alone(num_tokens): the texts after all prompts, one at a time, without drafts."""

    @cache
    def write(num_tokens):
        return [written(target[1], prompt, num_tokens) for prompt in PROMPTS]

    return write


def difference(model, prompt, text):
    """The largest difference of logits, with tokens that are the best where it is clear."""
    expected_NV = logits_of(model, prompt + text.tokens[:-1])[len(prompt) - 1 :]
    best_N2, id_N2 = expected_NV.topk(2)
    is_clear_N = best_N2[:, 0] - best_N2[:, 1] > 2 * LOGITS
    largest = float((text.logits_NV - expected_NV).abs().max())
    if largest <= LOGITS:
        assert torch.equal(torch.tensor(text.tokens)[is_clear_N], id_N2[:, 0][is_clear_N])
    return largest


@pytest.mark.parametrize("num_tokens", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_logits_and_tokens_are_those_of_transformers(target, alone, num_tokens):
    for prompt, text in zip(PROMPTS, alone(num_tokens), strict=True):
        assert difference(target[0], prompt, text) <= LOGITS, len(prompt)
        if num_tokens == 64:
            assert len(set(text.tokens)) >= 20, "a dull target: choose another seed"


@pytest.mark.parametrize(
    "K, num_tokens",
    [(3, 8), *(pytest.param(K, 48, marks=pytest.mark.slow) for K in (3, 5))],
)
def test_drafts_and_neighbours_change_no_token(target, alone, K, num_tokens):
    loaded = target[1]
    eagle = random_draft(eagle3_config(loaded, head_dim=loaded.config.heads.head_dim))
    expected = [text.tokens for text in alone(num_tokens)]
    assert tokens_of(loaded, eagle, PROMPTS, num_tokens, num_drafts=K) == expected


@pytest.mark.parametrize("num_tokens", [6, pytest.param(48, marks=pytest.mark.slow)])
def test_packed_weights_write_what_their_numbers_do(saved, tmp_path, num_tokens):
    write_both_forms(saved[1], tmp_path / "packed", tmp_path / "plain")
    packed, plain = (load_target(tmp_path / name, progress=False) for name in ("packed", "plain"))
    for prompt in PROMPTS[1:5:3]:
        found, expected = (written(each, prompt, num_tokens) for each in (packed, plain))
        assert torch.equal(found.logits_NV, expected.logits_NV)
        assert found.tokens == expected.tokens


def with_kinds(loaded, change):
    """change(kind): fields of it that are other ones."""
    layers = tuple(dataclasses.replace(kind, **change(kind)) for kind in loaded.config.layers)
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, layers=layers))


def with_experts(loaded, **changes):
    return with_kinds(
        loaded, lambda kind: {"experts": dataclasses.replace(kind.experts, **changes)}
    )


def with_clamp(loaded, **changes):
    clamp = loaded.config.layers[0].experts.clamp._replace(**changes)
    return with_experts(loaded, clamp=clamp)


def with_rope(loaded, **changes):
    return with_kinds(loaded, lambda kind: {"rope": dataclasses.replace(kind.rope, **changes)})


def with_window(loaded, window):
    return with_kinds(loaded, lambda kind: {"window": kind.window and window})


def with_tensors(loaded, part, change):
    changed = {name: change(x.clone()) for name, x in loaded.tensors.items() if part in name}
    assert changed, part
    return dataclasses.replace(loaded, tensors=loaded.tensors | changed)


def by_turns(x_EX):
    """Rows of gate and up as files have them."""
    gate, up = x_EX.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def without_queries_bias(bias):
    bias[:64] = 0
    return bias


LOST = {
    "a window that is too short": lambda x: with_window(x, 23),
    "a window that is too long": lambda x: with_window(x, 25),
    "sinks": lambda x: with_tensors(x, ".sinks", lambda s: s.fill_(-1e9)),
    "the clamp": lambda x: with_clamp(x, limit=1e9),
    "alpha": lambda x: with_clamp(x, alpha=1.0),
    "the softmax over the chosen": lambda x: with_experts(x, renormalise=False),
    "the router's bias": lambda x: with_tensors(x, ".gate.bias", torch.zero_),
    "the order of gate and up": lambda x: with_tensors(x, "experts.gate_up_proj", by_turns),
    "fractions of yarn's borders": lambda x: with_rope(x, truncate=True),
    "yarn's magnitude": lambda x: with_rope(x, attention_factor=1.0),
    "the queries' bias": lambda x: with_tensors(x, "qkv_proj.bias", without_queries_bias),
    "biases of gate and up": lambda x: with_tensors(x, "gate_up_proj_bias", torch.zero_),
    "biases of down": lambda x: with_tensors(x, "down_proj_bias", torch.zero_),
    "the output's bias": lambda x: with_tensors(x, "o_proj.bias", torch.zero_),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_shows_in_the_logits(target, name):
    model, loaded = target
    text = written(LOST[name](loaded), PROMPTS[-1], 1)
    assert difference(model, PROMPTS[-1], text) > 10 * LOGITS


def clamped_below(gate, up, clamp):
    gate, up = (x.clamp(-clamp[0], clamp[0]) for x in (gate, up))
    return gate / (1.0 + blocked_exp(-clamp[1] * gate)) * (up + 1.0)


def without_one(gate, up, clamp):
    gate, up = gate.clamp(max=clamp[0]), up.clamp(-clamp[0], clamp[0])
    return gate / (1.0 + blocked_exp(-clamp[1] * gate)) * up


@pytest.mark.parametrize("activated", [clamped_below, without_one])
def test_another_activation_shows_in_the_logits(target, monkeypatch, activated):
    model, loaded = target
    monkeypatch.setattr(mlp, "activated_ref", activated)
    text = written(loaded, PROMPTS[-1], 1)
    assert difference(model, PROMPTS[-1], text) > 10 * LOGITS
