"""Block drafts against tests/naive_block.py: what they compute, and that nothing else moves it."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec.config import GraphConfig, graph_modes
from specdec.drafts import block
from specdec.requests.params import SamplingFlags, SamplingStart
from specdec.rounds import candidates
from specdec.rounds import propose as propose_module
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import PLAIN, EngineSizes, TreeShape, chain
from tests import naive_block
from tests.naive_block import (
    MUTANTS,
    MUTANTS_OF_DFLASH2,
    propose,
    propose_tree,
    read_draft,
)
from tests.naive_eagle import sampled, target_features
from tests.naive_tree import Sampling, Shape, Tree
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
from tests.specdec.graph_walk import tiny
from tests.specdec.tiny_pair import on_disk, random_draft
from tests.weights.blocks import DFLASH2, DSPARK, FORMATS, block_config
from tests.weights.tiny import tiny_target
from weights import LoadedEagle, RopeConfig

D2T = {"has_d2t": True, "draft_vocab_size": 40, "has_own_head": True}
KINDS = {
    "dflash": {},
    "dflash, anchor": {"anchor_proposes": True},
    "dspark": DSPARK,
    "dspark, gated": DSPARK | {"markov": "gated"},
    "dspark, rnn": DSPARK | {"markov": "rnn", "confidence": "hidden"},
    "dspark, masks propose": DSPARK | {"anchor_proposes": False},
    "dspark, d2t": DSPARK | D2T,
    "dspark, no confidence": DSPARK | {"confidence": None},
    "dflash2": DFLASH2,
    "dflash2, anchor": DFLASH2 | {"anchor_proposes": True},
    "dflash2, all ids": DFLASH2 | {"conv_group_size": 1, "selector_top_k": 64},
    "own embedding and head": {"has_own_embedding": True, "has_own_head": True},
    "taps at both ends": DSPARK | {"aux_boundaries": (0, 3, 8)},
    "biases, no qk_norm": {"qkv_bias": True, "qk_norm": False},
    "one layer": {"num_layers": 1, "aux_boundaries": (4,)},
    "rope": {"rope": RopeConfig(theta=100.0)},
}
FEW = (
    *("dflash", "dspark", "dspark, gated", "dspark, rnn", "dspark, masks propose", "dspark, d2t"),
    "dflash2",
)
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW]
SLOW = pytest.mark.slow
naive_after = partial(drafts_after, propose)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("target"), tiny_target("qwen3").config)


@pytest.fixture
def draft_of(target, tmp_path):
    """draft_of(kind, format): as the engine reads it, and as the naive reader does."""

    def load(kind: str, format: str | None = None) -> tuple[LoadedEagle, SimpleNamespace, dict]:
        config = block_config(target.loaded, **KINDS[kind])
        able = [name for name, f in FORMATS.items() if f.can_express(config, target.loaded)]
        how = format or able[0]
        tensors = random_draft(config).tensors
        return read_both(tmp_path / how, FORMATS[how], config, tensors, target, read_draft)

    return load


def distance(found_KW: Tensor, expected_KW: Tensor) -> float:
    """The greatest difference of logits; infinite where one of them alone is -inf."""
    is_same_KW = found_KW == expected_KW
    return float((found_KW - expected_KW).abs().masked_fill(is_same_KW, 0).max())


def check(target, engine, cfg, weights, length):
    """Compare logits, tokens and confidences after a prompt."""
    engine.start(ROW, BLOCKS)
    [first] = engine.prefill([prompt_of(length)], [ROW], [BLOCKS])
    found = naive_after(
        target, cfg, weights, [*prompt_of(length), first], engine.K, longest=LONGEST
    )
    logits_KW = torch.cat(engine.logits)
    assert distance(logits_KW, found.logits_KW) < 2e-5
    assert engine.runner.state.draft_tokens[ROW, : engine.K].tolist() == found.tokens
    head = engine.runner.draft.model.confidence_head
    assert (head is None) == (found.confidences == [])
    for i, confidence in enumerate(found.confidences):
        hidden_1D = engine.hidden[0][i + engine.runner.sizes.anchor_rows][None]
        e_1r = None
        if head.reads_markov:
            before = torch.tensor([[first, *found.tokens][i]])
            e_1r = engine.runner.draft.model.markov_head.markov_w1(before)
        assert abs(float(head(hidden_1D, e_1r)) - confidence) < 2e-5
    return logits_KW, found


@pytest.mark.parametrize("kind", [*FEW, *OTHERS])
def test_logits_and_confidences_are_the_naive_drafts(target, draft_of, kind, monkeypatch):
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, draft.config.max_drafts, monkeypatch)
    for length in (2, 64, 65):
        check(target, engine, cfg, weights, length)


def test_a_borrowed_head_has_the_factor_of_the_targets_logits(target, draft_of, monkeypatch):
    """What the markov head adds has not."""
    draft, cfg, weights = draft_of("dspark")
    engine = Engine(target, draft, 2, monkeypatch)
    engine.runner.draft.model.logits_factor = 0.25
    weights["lm_head.weight"] = 0.25 * weights["lm_head.weight"]
    check(target, engine, cfg, weights, 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_in_every_format_after_any_context_for_every_k(
    target, draft_of, kind, monkeypatch
):
    config = block_config(target.loaded, **KINDS[kind])
    able = [name for name, f in FORMATS.items() if f.can_express(config, target.loaded)]
    assert able
    for format in able:
        draft, cfg, weights = draft_of(kind, format)
        for K in range(1, config.max_drafts + 1):
            engine = Engine(target, draft, K, monkeypatch)
            for length in CONTEXTS:
                check(target, engine, cfg, weights, length)


def moved(cfg: SimpleNamespace, by: int) -> SimpleNamespace:
    taps = tuple(boundary + by for boundary in cfg.aux_boundaries)
    return SimpleNamespace(**vars(cfg) | {"aux_boundaries": taps})


SEEN_IN_LOGITS = tuple(
    mutant
    for mutant in MUTANTS
    if mutant not in ("bias after temperature", "markov_w1 by draft id")
)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_every_mutant_of_the_backbone_is_seen(target, draft_of, kind, monkeypatch):
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, 4, monkeypatch)
    logits_KW, _ = check(target, engine, cfg, weights, 65)
    tokens = [*prompt_of(65), int(engine.runner.state.last_sampled_tokens[ROW])]
    seen = MUTANTS_OF_DFLASH2 * (kind == "dflash2") + SEEN_IN_LOGITS
    mutants = [SimpleNamespace(**vars(cfg), mutant=mutant) for mutant in seen]
    for mutant in (*mutants, moved(cfg, 1), moved(cfg, -1)):
        wrong = naive_after(target, mutant, weights, tokens, 4)
        assert distance(logits_KW, wrong.logits_KW) > 1e-3, mutant


def test_markov_w1_goes_by_the_targets_ids(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("dspark, d2t")
    engine = Engine(target, draft, 4, monkeypatch)
    logits_KW, _ = check(target, engine, cfg, weights, 9)
    tokens = [*prompt_of(9), int(engine.runner.state.last_sampled_tokens[ROW])]
    cfg.mutant = "markov_w1 by draft id"
    wrong = naive_after(target, cfg, weights, tokens, 4)
    assert distance(logits_KW, wrong.logits_KW) > 1e-3


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark, d2t", "dflash2"])
def test_drafts_are_drawn_with_the_targets_noise_after_the_bias(
    target, draft_of, kind, monkeypatch
):
    draft, cfg, weights = draft_of(kind)
    T, engine = 0.5, Engine(target, draft, 4, monkeypatch, num_reqs=12)
    prompt, firsts = draw(engine, T)
    mutants = "bias after temperature", "candidates without noise"
    seen = set()
    for row, first in enumerate(firsts):
        drafts = engine.runner.state.draft_tokens[row].tolist()
        for mutant in (None, *mutants):
            config, tokens = SimpleNamespace(**vars(cfg), mutant=mutant), [*prompt, first]
            found = naive_after(target, config, weights, tokens, 4, scores=sampled(T, row)).tokens
            seen |= set() if found == drafts else {mutant}
    assert seen == set(mutants if cfg.selector_top_k else mutants[: cfg.markov is not None])
    assert len(engine.runner.state.draft_tokens.unique(dim=0)) > 6


def test_under_pq_a_selectors_drafts_have_a_law_that_knows_no_noise(target, draft_of, monkeypatch):
    """That of each draft is over the best tokens of its row's logits, after the draft before."""
    draft, cfg, weights = draft_of("dflash2")
    engine = Engine(target, draft, 4, monkeypatch, rule="rejection")
    prompt, flags = prompt_of(9), SamplingFlags(noise=True)
    for seed in range(3):
        engine.start(ROW, BLOCKS, temperature=0.8, seed=seed)
        [first] = engine.prefill([prompt], [ROW], [BLOCKS], flags=flags)
        state = engine.runner.state
        drafts = state.draft_tokens[ROW, :4].tolist()

        def forced(_, position, ids, drafts=drafts):
            return (ids == drafts[position - len(prompt) - 1]).float()

        cfg.mutant = "candidates without noise"
        found = naive_after(target, cfg, weights, [*prompt, first], 4, scores=forced)
        assert found.tokens == drafts
        assert distance(torch.cat(engine.logits), found.logits_KW) < 2e-5
        assert distance(0.8 * state.draft_scores[ROW], found.logits_KW) < 2e-5


BY_KERNELS = "drafts.block", "rounds.candidates", "kernels.add_transitions", "kernels.convolve"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_kernels_draft_what_their_twins_do(target, draft_of, kind, monkeypatch):
    """Greedy requests beside drawn ones, and padding; by Triton's interpreter."""
    draft, _, _ = draft_of(kind)
    monkeypatch.setattr(candidates, "LANES", 64)  # of 96 ids
    engine = Engine(target, draft, 4, monkeypatch, num_reqs=5)
    rows, prompts = [0, 1, 3], [prompt_of(length) for length in (7, 20, 7)]
    found = []
    for is_kernel in (False, True):
        for module in BY_KERNELS if is_kernel else ():
            monkeypatch.setattr(f"specdec.{module}.use_triton", lambda _: True)
        for row, temperature in zip(rows, (0.0, 0.7, 1.2), strict=True):
            engine.start(row, [4 * row + i for i in range(4)], temperature=temperature, seed=row)
        blocks = [[4 * row + i for i in range(4)] for row in rows]
        engine.prefill(prompts, rows, blocks, flags=SamplingFlags(noise=True))
        assert (engine.logits == []) == is_kernel
        state = engine.runner.state
        found.append((state.draft_tokens[rows].clone(), state.num_nodes[rows].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].tolist() == found[1][1].tolist() == [4, 4, 4]
    assert len(found[0][0].unique()) > 6


@pytest.mark.parametrize("kind, temperature", [("dspark", 0.0), ("dspark", 0.3), ("dflash2", 0.0)])
def test_of_tokens_in_one_lane_the_best_is_a_candidate(
    target, draft_of, kind, temperature, monkeypatch
):
    """Ids share 8 lanes, so other drafts are chosen than among all of them."""
    draft, cfg, weights = draft_of(kind)
    cfg.selector_top_k = min(cfg.selector_top_k, 6)
    engine = Engine(target, draft, 4, monkeypatch)
    if engine.runner.draft.model.candidate_selector is not None:
        engine.runner.draft.model.candidate_selector.top_k = cfg.selector_top_k
    monkeypatch.setattr(candidates, "LANES", 8)
    more = {"scores": sampled(temperature, 5)} if temperature else {}
    num_others = 0
    for length in (3, 9, 20, 33):
        engine.start(ROW, BLOCKS, temperature=temperature, seed=5)
        flags = SamplingFlags(noise=temperature > 0)
        [first] = engine.prefill([prompt_of(length)], [ROW], [BLOCKS], flags=flags)
        drafts, tokens = engine.runner.state.draft_tokens[ROW].tolist(), [*prompt_of(length), first]
        for num_lanes in (4096, 8):
            monkeypatch.setattr(naive_block, "LANES", num_lanes)
            found = naive_after(target, cfg, weights, tokens, 4, **more).tokens
            num_others += found != drafts
        assert found == drafts
    assert num_others > 0


@pytest.mark.parametrize("kind", ["dspark, rnn", "dflash2"])
def test_what_is_drafted_depends_on_no_neighbour_and_no_chunk(target, draft_of, kind, monkeypatch):
    draft, _, _ = draft_of(kind)
    check_rows_alone(Engine(target, draft, 5, monkeypatch, num_reqs=5))


@pytest.mark.parametrize(
    "by, temperature",
    [("twins", 0.8), ("kernels", 0.0)]
    + [pytest.param(*each, marks=SLOW) for each in (("twins", 0.0), ("kernels", 0.8))],
)
@pytest.mark.parametrize(
    "kind", ["dflash", "dspark", "dflash2", pytest.param("dspark, rnn", marks=SLOW)]
)
def test_drafts_of_a_number_that_varies_have_probabilities(
    target, draft_of, kind, by, temperature, monkeypatch
):
    """Of blocks that are whole or shorter; kernels leave maxima and sums of tiles."""
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, 5, monkeypatch, is_adaptive=True)
    monkeypatch.setattr(block, "use_triton", lambda _: by == "kernels")
    monkeypatch.setattr(propose_module, "use_triton", lambda _: by == "kernels")
    monkeypatch.setattr(candidates, "LANES", 128)  # for the interpreter's sake
    check_lengths(engine, partial(naive_after, target, cfg, weights), (5, 3, 1), temperature)


TREE = TreeShape(num_levels=4, top_k=3, num_nodes=11)


def assert_is_tree(runner: Runner, row: int, found: Tree) -> None:
    """Compare the nodes of a state row and batch slot, those that are kept and all."""
    state, wide, rows = runner.state, runner.buffers.candidates, found.rows()
    assert state.draft_tokens[row].tolist() == [node.token for node in rows]
    assert state.draft_parents[row].tolist() == [node.parent for node in rows]
    expected = [math.exp(node.score) for node in rows]
    assert state.draft_probs[row].tolist() == pytest.approx(expected, rel=1e-3)
    assert wide.tokens[row].tolist() == [node.token for node in found.nodes]
    assert wide.places[row].tolist() == [node.parent for node in found.nodes]


@pytest.mark.parametrize(
    "by, temperature",
    [("twins", 0.8), ("kernels", 0.0)]
    + [pytest.param(*each, marks=SLOW) for each in (("twins", 0.0), ("kernels", 0.8))],
)
@pytest.mark.parametrize(
    "kind",
    ["dspark, rnn"]
    + [pytest.param(kind, marks=SLOW) for kind in FEW if kind not in ("dspark, rnn", "dflash2")],
)
def test_trees_are_the_naive_ones(target, draft_of, kind, by, temperature, monkeypatch):
    """A row serves all nodes of its depth, each after what the head says of it."""
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, TREE.num_levels, monkeypatch, tree=TREE)
    engine.K = TREE.num_levels
    for module in (block, propose_module):
        monkeypatch.setattr(module, "use_triton", lambda _: by == "kernels")
    shape = Shape(TREE.num_rows, TREE.num_levels, TREE.top_k)
    flags = SamplingFlags(noise=temperature > 0)
    blocks, num_safe = [BLOCKS, [0, 1, 6, 7]], 0
    for lengths in ((2, 9), (65, 64)):
        texts = [prompt_of(length) for length in lengths]
        for row in (0, 1):
            engine.start(row, blocks[row], temperature=temperature, seed=row)
        firsts = engine.prefill(texts, [0, 1], blocks, flags=flags)
        for row, first in enumerate(firsts):
            texts[row].append(first)
            outputs = target.reference.forward(texts[row][:-1])
            features = target_features(cfg, outputs.boundaries, outputs.hidden_TD)
            how = shape, Sampling(temperature, row)
            found = propose_tree(cfg, weights, texts[row], features, *how)
            if found.margin > 1e-4:
                num_safe += 1
                assert_is_tree(engine.runner, row, found)
    assert num_safe > 2


@pytest.mark.parametrize("kind", ["dflash", "dspark, rnn"])
def test_smaller_trees_beside_chains_are_those_of_shorter_blocks(
    target, draft_of, kind, monkeypatch
):
    """To the bit; chains of this engine have probabilities."""
    draft, _, _ = draft_of(kind)
    small = TreeShape(num_levels=3, top_k=3, num_nodes=8)
    beside = dataclasses.replace(TREE, smaller=((2, small.num_levels, small.num_nodes),))
    found = []
    for tree, adapts in ((small, False), (beside, True)):
        engine = Engine(
            *(target, draft, tree.num_levels, monkeypatch), tree=tree, is_adaptive=adapts
        )
        for row in (0, 1):
            engine.start(row, [4 * row + i for i in range(4)])
        blocks, prompts = [[0, 1, 2, 3], [4, 5, 6, 7]], [prompt_of(9), prompt_of(64)]
        engine.prefill(prompts, [0, 1], blocks, next_shape=small.drafts)
        state = engine.runner.state
        nodes = state.draft_tokens, state.draft_parents, state.draft_probs
        found.append([each[:2, : small.num_nodes] for each in nodes])
    assert all(map(torch.equal, *found))


def test_a_request_with_fewer_drafts_has_a_shorter_block(target, draft_of, monkeypatch):
    draft, cfg, weights = draft_of("dspark, masks propose")
    engine = Engine(target, draft, 5, monkeypatch)
    for own in (1, 2, 4):
        engine.start(ROW, BLOCKS)
        engine.runner.state.num_draft_tokens[ROW] = own
        [first] = engine.prefill([prompt_of(40)], [ROW], [BLOCKS])
        found = naive_after(target, cfg, weights, [*prompt_of(40), first], own)
        assert distance(torch.cat(engine.logits)[:own], found.logits_KW) < 2e-5
        assert engine.runner.state.num_nodes[ROW] == own


@pytest.mark.parametrize(
    "kind", ["dflash", "dspark", pytest.param("dflash2", marks=pytest.mark.slow)]
)
def test_a_block_ends_with_the_context(target, draft_of, kind, monkeypatch):
    draft, cfg, weights = draft_of(kind)
    engine = Engine(target, draft, 5, monkeypatch, longest=70)
    check_end_of_context(engine, partial(naive_after, target, cfg, weights))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_slots_after_the_committed_tokens_may_hold_anything(target, draft_of, kind, monkeypatch):
    draft, _, _ = draft_of(kind)
    check_slots(target, lambda: Engine(target, draft, 5, monkeypatch), [None] * 4)


def test_they_may_where_the_number_of_drafts_varies(target, draft_of, monkeypatch):
    draft, _, _ = draft_of("dflash2")
    make_engine = partial(Engine, target, draft, 5, monkeypatch, is_adaptive=True)
    check_slots(target, make_engine, [*map(chain, (5, 3, 0, 0, 3, 5, 0))])


def walk(backend, kind, is_adaptive=False):
    """Rounds of three requests, two and one, after prompts; drafts and states of each step.

    is_adaptive: of which some propose half a block, or none
    """
    pair = tiny(kind, torch.device("cpu"))
    K = 3 if is_adaptive else pair.eagle.config.max_drafts
    sizes = EngineSizes(
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        num_kv_blocks=6,
        num_speculative_tokens=K,
        is_adaptive=is_adaptive,
        block_rows=pair.eagle.config.block_rows(K),
    )
    modes = graph_modes({"target_prefill": "NONE", "target_decode": "NONE"})
    graphs = GraphConfig(request_sizes=(3,), modes=modes)
    runner = Runner(
        pair.target, pair.eagle, sizes, pair.device, graph_config=graphs, backend=backend
    )
    runner.capture()
    parts = []
    for row in range(3):
        blocks = [2 * row, 2 * row + 1]
        sampling = SamplingStart(temperature=0.8 * (row == 1), seed=row)
        start = RowStart(blocks=blocks, num_draft_tokens=K, sampling=sampling)
        runner.start_rows([(row, start)])
        prompt = prompt_of(3 + 2 * row)
        whole = {"prompt": prompt, "start": 0, "length": len(prompt), "blocks": blocks}
        parts.append(PromptPart(state_row=row, **whole))
    runner.run_step(parts=parts)
    trace = [runner.state.draft_tokens[:3].clone()]
    rounds = [([0, 1, 2], {"flags": SamplingFlags(noise=True)}), ([2, 0], {}), ([0], {})]
    if is_adaptive:
        half, plain = chain(-(-K // 2)), {"shape": PLAIN, "next_shape": PLAIN}
        rounds[0][1].update(shared_rows=8, next_shape=half)
        rounds[1][1].update(shared_rows=6, next_shape=PLAIN)
        rounds[2:] = [([2, 0], plain), ([0], {"shared_rows": 3, "next_shape": chain(K)})]
    for rows, how in rounds:
        runner.buffers.sample_mapping.fill_(10**6)
        runner.run_step(rows, max_num_computed=60, **how)
        result = runner.read(len(rows))
        state = runner.state
        trace += [torch.tensor(result.sampled_tokens), state.draft_tokens[:3].clone()]
        trace += [state.num_nodes[:3].clone(), state.draft_probs[:3].clone()]
        trace.append(runner.draft_cache[:, :, :6].clone())
    return trace, runner.graphs.counters()


@pytest.mark.parametrize(
    "kind, is_adaptive",
    [("dspark", False), ("dspark", True)]
    + [pytest.param("dflash", each, marks=SLOW) for each in (False, True)]
    + [pytest.param("dflash2", each, marks=SLOW) for each in (False, True)]
    + [pytest.param("peagle", True, marks=SLOW)],
)
def test_graphs_draft_what_single_launches_do(kind, is_adaptive):
    captured, counters = walk(TapeBackend(), kind, is_adaptive)
    eager, _ = walk(None, kind, is_adaptive)
    assert all(map(torch.equal, captured, eager))
    assert len(captured[0].unique()) > 3
    assert captured[4].shape[1] == (captured[1].shape[1] - 1) * is_adaptive
    replays = {name: counter.replays[CUDAGraphMode.FULL] for name, counter in counters.items()}
    # after a prompt the first is launched op by op
    expected = (4, 3) if is_adaptive else (3, 4)
    if kind == "peagle":  # which has a family of its own for plain rounds
        assert replays["draft_extend"] == 1
        expected = (3, 3)
    assert (replays["draft_prefill"], replays["draft_decode"]) == expected
