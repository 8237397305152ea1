"""P-EAGLE drafts against tests/naive_parallel.py: what they compute, and that nothing moves it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from specdec.rounds import propose as propose_module
from specdec.sizes import chain
from tests.naive_eagle import sampled
from tests.naive_parallel import MUTANTS, propose, read_draft
from tests.specdec.drafts.one_pass import (
    BLOCKS,
    CONTEXTS,
    LONGEST,
    ROW,
    Engine,
    check_end_of_context,
    check_lengths,
    check_rows_alone,
    check_slots,
    drafts_after,
    draw,
    prompt_of,
    read_both,
)
from tests.specdec.tiny_pair import on_disk, random_draft
from tests.weights.formats import PARALLEL
from tests.weights.tiny import eagle3_config, tiny_target
from weights import LoadedEagle, RopeConfig

FULL = {"has_d2t": False, "draft_vocab_size": 96, "has_own_head": False}
KINDS = {
    "four layers, d2t": {"num_layers": 4},
    "one layer": {"num_layers": 1, "norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "has_own_embedding": True},
    "a norm for each tap": {"has_fc_norm": True, "aux_boundaries": (0, 3, 5, 7, 8)},
    "before the residual": {"norm_before_residual": True, "norm_before_fc": True},
    "the target's head": FULL | {"qk_norm": True},
    "rope, biases": {"rope": RopeConfig(theta=100.0), "qkv_bias": True},
    "narrow": {"hidden_size": 24, "has_own_embedding": True, "has_fc_norm": True},
}
FEW = "four layers, d2t", "norm before fc"
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("target"), tiny_target("qwen3").config)


def config_of(target, kind):
    common = {"num_layers": 2, "mask_token_id": 93, "max_position_embeddings": 256}
    return eagle3_config(target.loaded, **common | KINDS[kind])


@pytest.fixture
def draft_of(target, tmp_path):
    """draft_of(kind, format): as the engine reads it, and as the naive reader does."""

    def load(kind: str, format: str = "p-eagle") -> tuple[LoadedEagle, SimpleNamespace, dict]:
        config, directory = config_of(target, kind), tmp_path / format
        tensors = random_draft(config).tensors
        return read_both(directory, PARALLEL[format], config, tensors, target, read_draft)

    return load


naive_after = partial(drafts_after, propose)


def check(target, engine, cfg, weights, length):
    """Compare logits and tokens after a prompt; return them and the tokens before them."""
    engine.start(ROW, BLOCKS)
    [first] = engine.prefill([prompt_of(length)], [ROW], [BLOCKS])
    tokens = [*prompt_of(length), first]
    found = naive_after(target, cfg, weights, tokens, engine.K, longest=LONGEST)
    logits_KW = torch.cat(engine.logits)
    assert (logits_KW - found.logits_KW).abs().max() < 2e-5
    assert engine.runner.state.draft_tokens[ROW, : engine.K].tolist() == found.tokens
    return logits_KW, tokens


@pytest.mark.parametrize("kind", [*FEW, *OTHERS])
@pytest.mark.parametrize("format", PARALLEL)
def test_logits_are_the_naive_drafts(target, draft_of, kind, format, monkeypatch):
    draft, cfg, weights = draft_of(kind, format)
    engine = Engine(target, draft, 5, monkeypatch)
    for length in (2, 64, 65):
        check(target, engine, cfg, weights, length)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 2, 5, 9])
def test_they_are_after_any_context_for_every_k(target, draft_of, kind, K, monkeypatch):
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, K, monkeypatch)
    for length in CONTEXTS:
        check(target, engine, cfg, weights, length)


def test_a_borrowed_head_has_the_factor_of_the_targets_logits(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("the target's head")
    engine = Engine(target, draft, 3, monkeypatch)
    engine.runner.draft.model.logits_factor = 0.25
    weights["lm_head.weight"] = 0.25 * weights["lm_head.weight"]
    check(target, engine, cfg, weights, 9)


def test_every_mutant_is_seen(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("norm before fc")
    engine = Engine(target, draft, 5, monkeypatch)
    logits_KW, tokens = check(target, engine, cfg, weights, 65)
    mutants = [{"mutant": mutant} for mutant in MUTANTS]
    for by in (1, -1):
        mutants.append({"aux_boundaries": tuple(b + by for b in cfg.aux_boundaries)})
    for mutant in mutants:
        wrong = SimpleNamespace(**vars(cfg) | mutant)
        found = naive_after(target, wrong, weights, tokens, 5).logits_KW
        assert (logits_KW[1:] - found[1:]).abs().max() > 1e-3, mutant


@pytest.mark.parametrize("kind", [FEW[0], pytest.param(FEW[1], marks=pytest.mark.slow)])
def test_drafts_are_drawn_with_the_targets_noise(target, draft_of, kind, monkeypatch):
    draft, cfg, weights = draft_of(kind)
    T, engine = 0.7, Engine(target, draft, 4, monkeypatch, num_reqs=8)
    prompt, firsts = draw(engine, T)
    drafts = engine.runner.state.draft_tokens.tolist()
    for row, first in enumerate(firsts):
        found = naive_after(target, cfg, weights, [*prompt, first], 4, scores=sampled(T, row))
        assert drafts[row] == found.tokens
    assert len(set(map(tuple, drafts))) > 4


def test_what_is_drafted_depends_on_no_neighbour_and_no_chunk(target, draft_of, monkeypatch):
    draft, _, _ = draft_of("four layers, d2t")
    check_rows_alone(Engine(target, draft, 5, monkeypatch, num_reqs=5))


def test_a_request_with_fewer_drafts_has_fewer_rows(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("norm before fc")
    engine = Engine(target, draft, 5, monkeypatch)
    for own in (0, 2):
        engine.start(ROW, BLOCKS)
        engine.runner.state.num_draft_tokens[ROW] = own
        [first] = engine.prefill([prompt_of(40)], [ROW], [BLOCKS])
        found = naive_after(target, cfg, weights, [*prompt_of(40), first], max(own, 1))
        logits_KW = torch.cat(engine.logits)[:own]
        assert torch.allclose(logits_KW, found.logits_KW[:own], atol=2e-5, rtol=0)
        assert engine.runner.state.num_nodes[ROW] == own
        last = 40 + max(own - 1, 0)
        assert engine.runner.draft_cache[:, :, BLOCKS[0], :, :last].isfinite().all()
        assert engine.runner.draft_cache[:, :, BLOCKS[0], :, last:].isnan().all()


def test_masks_end_with_the_context(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("norm before fc")
    engine = Engine(target, draft, 5, monkeypatch, longest=70)
    check_end_of_context(engine, partial(naive_after, target, cfg, weights))


def test_slots_after_the_committed_tokens_may_hold_anything(target, draft_of, monkeypatch):
    draft, _, _ = draft_of("four layers, d2t")
    check_slots(target, lambda: Engine(target, draft, 5, monkeypatch), [None] * 3)


def test_they_may_where_the_number_of_drafts_varies(target, draft_of, monkeypatch):
    draft, _, _ = draft_of("four layers, d2t")
    make_engine = partial(Engine, target, draft, 5, monkeypatch, is_adaptive=True)
    check_slots(target, make_engine, [*map(chain, (5, 3, 0, 0, 3, 5, 0))])


@pytest.mark.parametrize(
    "by, temperature",
    [("twins", 0.8), ("kernels", 0.0)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("twins", 0.0), ("kernels", 0.8))],
)
def test_drafts_of_a_number_that_varies_have_probabilities(
    target, draft_of, by, temperature, monkeypatch
):
    draft, cfg, weights = draft_of("norm before fc")
    engine = Engine(target, draft, 5, monkeypatch, is_adaptive=True)
    monkeypatch.setattr(propose_module, "use_triton", lambda _: by == "kernels")
    check_lengths(engine, partial(naive_after, target, cfg, weights), (5, 3, 1), temperature)


def test_fewer_drafts_are_the_first_ones_of_more(target, draft_of, monkeypatch):
    """To the bit; a single one runs no masks."""
    draft, _, _ = draft_of("four layers, d2t")
    engine = Engine(target, draft, 5, monkeypatch, is_adaptive=True)
    found = {}
    for length in (1, 3, 5):
        engine.start(ROW, BLOCKS)
        engine.prefill([prompt_of(40)], [ROW], [BLOCKS], next_shape=chain(length))
        found[length] = torch.cat(engine.logits)
        last = 40 + length - 1
        assert engine.runner.draft_cache[:, :, BLOCKS[0], :, :last].isfinite().all()
        assert engine.runner.draft_cache[:, :, BLOCKS[0], :, last:].isnan().all()
    assert torch.equal(found[1], found[5][:1])
    assert torch.equal(found[3], found[5][:3])
