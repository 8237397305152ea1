"""Parallel drafts in the whole engine: no text moves, and drafts are the naive loop's."""

import dataclasses
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from graphs.cuda import CudaBackend
from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import LLM, SamplingParams
from specdec.config import GraphConfig
from specdec.requests.metrics import Counter
from specdec.requests.request import whole_output
from specdec.requests.tokenizer import Tokenizer
from specdec.runner import Runner
from specdec.scheduling.costs import StepCosts
from specdec.scheduling.planner import RoundPlan
from specdec.sizes import PLAIN, EngineSizes, TreeShape, chain
from specdec.start.load import assemble
from tests import naive_block, naive_parallel
from tests.block_pair import SELECTOR, write_bigrams, write_parallel
from tests.e2e.test_drafts import ScriptedDraft
from tests.naive_eagle import borrow, sampled
from tests.naive_eagle import greedy as by_logits
from tests.reference import Reference
from tests.shared_rows import at_random, rows_are_shared
from weights.demo import demo_directory
from weights.load import load_eagle, load_target

D2T = {"has_d2t": True, "draft_vocab_size": 700, "has_own_head": True}
KINDS = {  # format and what differs
    "dspark": ("deepspec-dspark", {}),
    "masks propose": ("speculators", {"anchor_proposes": False}),
    "gated, d2t": ("speculators", {"markov": "gated", "confidence": "hidden", **D2T}),
    "specforge": ("specforge-dspark", {"anchor_proposes": False}),
    "dflash": ("dflash", {"anchor_proposes": False, "markov": None, "confidence": None}),
    "rnn": ("deepspec-dspark", {"markov": "rnn"}),
    "dflash2": ("speculators", SELECTOR),
    "peagle": ("p-eagle", {}),
    "peagle of speculators": ("speculators-peagle", {}),
}
FEW = "masks propose", "dspark", "dflash2", "peagle"
CHAINS = "dflash2", "peagle", "peagle of speculators"  # without trees
GROWING = [kind for kind in KINDS if kind not in CHAINS]
SIZES = {"max_num_seqs": 24, "max_model_len": 256, "device": "cpu"}
# of blocks of 3 tokens and of 5; rows are cheap
COSTS = StepCosts(
    rounds=((1024, 1.0),), plain=((24, 0.9),), blocks=((3, ((24, 0.1),)), (5, ((24, 0.2),)))
)
TREE = TreeShape(num_levels=5, top_k=3, num_nodes=11, smaller=((3, 4, 8),))
DEAR = dataclasses.replace(COSTS, blocks=((3, ((24, 9.0),)), (5, ((24, 9.0),))))


@pytest.fixture(scope="session")
def draft_at(tmp_path_factory):
    """draft_at(kind): the directory of such a draft."""

    @cache
    def write(kind):
        format, changes = KINDS[kind]
        write = write_parallel if kind.startswith("peagle") else write_bigrams
        return write(tmp_path_factory.mktemp("draft"), format, **changes)

    return write


@pytest.fixture(scope="session")
def block_llm(draft_at):
    """block_llm(kind, K, **options): an engine, kept for the session."""

    @cache
    def build(kind, K=5, **options):
        chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": K}
        return LLM("demo", chosen, **SIZES | options)

    return build


@pytest.fixture(scope="module")
def prompts(prompts):
    """The short ones: 49, 25, 49, 49, 25, 49 tokens, ..."""
    return [prompt for prompt in prompts if len(prompt) < 64]


@pytest.fixture(scope="module")
def reference():
    return Reference(demo_directory("target"))


def mixed(index, length=12):
    """What request `index` asks for."""
    kinds = [
        {"temperature": 0.0},
        {"top_p": 0.9, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"top_k": 20, "frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"structured_outputs": {"regex": r"(def|for) [a-z_]{3,9}\([a-z]{0,4}\):( [a-z]+)*"}},
        {"min_p": 0.05, "temperature": 1.4, "logit_bias": {13: 2.0}, "logprobs": 1},
        {"temperature": 0.0, "speculate": False},
        {"temperature": 0.7, "bad_words": [" self"]},
    ]
    values = {"temperature": 1.0, "seed": index, "max_tokens": length + index % 5}
    return SamplingParams(**values | kinds[index % len(kinds)])


def texts(llm, prompts, count, batch=None):
    """Tokens of every sample of mixed requests, in batches."""
    found = []
    for start in range(0, count, batch or count):
        ids = range(start, min(start + (batch or count), count))
        params = [mixed(i) for i in ids]
        outputs = llm.generate([prompts[i % 30] for i in ids], params, use_tqdm=False)
        found += [[each.token_ids for each in output.outputs] for output in outputs]
    llm.engine.drain()
    return found


def accepted_by(llm):
    """Count the drafts that held, of all requests so far."""
    counted = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    return counted["specdec:spec_decode_num_accepted_tokens"]


@pytest.fixture(scope="module")
def plain(demo_llm, prompts):
    return texts(demo_llm(None), prompts, 24)


@pytest.mark.parametrize("kind", ["masks propose"])
def test_texts_are_those_of_plain_decoding(block_llm, demo_llm, prompts, kind):
    """Prompts of several lengths come in chunks beside rounds."""
    llm = block_llm(kind, max_num_batched_tokens=40)
    assert texts(llm, prompts, 8) == texts(demo_llm(None), prompts, 8)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate(prompts[:2], params, use_tqdm=False)
    assert llm.run_stats(outputs).mean_acceptance_length > 1.7


OPTIONS = [
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7},
    {"max_num_seqs": 5},
    {"num_kv_blocks": 7, "max_model_len": 128},
    {"async_scheduling": True, "max_num_batched_tokens": 40},
]
EACH = [(kind, 5, {}) for kind in KINDS] + [("dspark", 1, {})]
EACH += [(kind, 3, options) for kind in FEW for options in OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize("kind, K, options", EACH)
def test_they_are_whatever_the_batch_chunk_and_cache(draft_at, prompts, plain, kind, K, options):
    chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": K}
    llm = LLM("demo", chosen, **SIZES | options)
    for batch in (24, 5, 1):
        assert texts(llm, prompts, 24, batch) == plain
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


# --- where their number adapts


@pytest.fixture(scope="session")
def adapting(draft_at):
    """adapting(kind, costs, tree, **options): an engine that drafts blocks as they pay."""

    def build(kind, costs=COSTS, tree=None, **options):
        chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": 5, "adaptive": True}
        with rows_are_shared(costs, tree):
            return LLM("demo", chosen, **SIZES | options)

    return build


def planned(llm, plans):
    """Make these the plans of the next rounds, the last of them again and again.

    plans: rows and how many tokens a chain has; "tree": a tree
    """
    left = list(plans)

    def plan(coming):
        rows, levels = left.pop(0) if len(left) > 1 else left[0]
        shape = coming.tree if levels == "tree" else chain(levels)
        return RoundPlan(max(coming.num_requests, rows), shape)

    llm.engine.planner.plan = plan


VARYING = [("dspark", {"async_scheduling": True, "max_num_batched_tokens": 40}, 4)]
VARYING += [
    pytest.param(kind, options, 16, marks=pytest.mark.slow)
    for kind in KINDS
    for options in ({}, *(OPTIONS[2:4] if kind in FEW else ()))
]


@pytest.mark.parametrize("kind, options, count", VARYING)
def test_texts_do_not_depend_on_rows_and_blocks_that_vary(
    adapting, demo_llm, prompts, kind, options, count
):
    llm = adapting(kind, **options)
    at_random(llm, random.Random(3))
    assert texts(llm, prompts, count) == texts(demo_llm(None), prompts, count)
    stats = llm.engine.planner.statistics
    assert {PLAIN} < {*stats.rounds} <= {PLAIN, chain(3), chain(5)}
    assert 0 < stats.num_wasted < stats.num_rows
    assert (llm.engine.planner.factors != 1).any()
    assert accepted_by(llm) > 3 or kind in ("dflash", "rnn")  # which know no bigrams
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROWING)
def test_texts_do_not_depend_on_chains_and_trees_in_turn(adapting, demo_llm, prompts, kind):
    llm = adapting(kind, tree=TREE, max_num_seqs=5)
    at_random(llm, random.Random(4), share=1.0)
    assert texts(llm, prompts, 12) == texts(demo_llm(None), prompts, 12)
    shapes = {*llm.engine.planner.statistics.rounds}
    assert shapes == {PLAIN, chain(3), chain(5), TREE.of(1).drafts, TREE.of(3).drafts}
    assert accepted_by(llm) > 3 or kind in ("dflash", "rnn")
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


@pytest.mark.parametrize("kind", ["dflash2", "peagle"])
def test_they_do_not_where_prompts_ride_in_parts_and_are_found_in_the_cache(
    adapting, demo_llm, prompts, kind
):
    """One request, then five at a time, greedy and sampled; plans are made by chance."""
    long = [*prompts[0], *prompts[1]][:70]
    asked = [[*long, *prompts[i][:9]] for i in range(5)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True)
        for i in range(5)
    ]
    expected = demo_llm(None).generate(asked, params, use_tqdm=False)
    llm = adapting(kind, max_num_batched_tokens=30, max_num_seqs=5)
    at_random(llm, random.Random(3), share=1.0)
    for num_asked, num_cached in ((1, 0), (5, 64)):
        found = llm.generate(asked[:num_asked], params[:num_asked], use_tqdm=False)
        for output, plain in zip(found, expected, strict=False):
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
            assert output.stats.num_cached_tokens == num_cached
    assert {*llm.engine.planner.statistics.rounds} == {PLAIN, chain(3), chain(5)}
    assert accepted_by(llm) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW[1:])
@pytest.mark.parametrize("costs, drafts", [(COSTS, True), (DEAR, False)])
def test_blocks_are_proposed_where_they_pay(adapting, prompts, greedy, kind, costs, drafts):
    llm = adapting(kind, costs)
    [output] = llm.generate(prompts[:1], greedy(120), use_tqdm=False)
    late = output.stats.num_drafted[len(output.stats.num_drafted) // 2 :]
    share = sum(count > 0 for count in late) / len(late)
    assert share > 0.9 if drafts else share < 0.1  # of probes


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_rows_for_whole_blocks_are_the_rounds_of_a_fixed_number(
    adapting, block_llm, prompts, greedy, kind
):
    llm = adapting(kind)
    planned(llm, [(24 * 6, 5)])
    for params in (greedy(16), SamplingParams(temperature=0.8, seed=3, max_tokens=16)):
        ours, theirs = (
            each.generate(prompts[:3], params, use_tqdm=False) for each in (llm, block_llm(kind))
        )
        assert [rounds_of(each) for each in ours] == [rounds_of(each) for each in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW[1:])
def test_a_prefix_that_plain_rounds_left_serves_later_blocks(adapting, prompts, greedy, kind):
    found, tokens = [], None
    for has_cache in (True, False):
        llm = adapting(kind, enable_prefix_caching=has_cache)
        planned(llm, [(1, 0)])
        [output] = llm.generate(prompts[:1], greedy(90), use_tqdm=False)
        tokens = [*prompts[0], *output.outputs[0].token_ids, 11]
        planned(llm, [(9, 5)])
        found += llm.generate([tokens], greedy(12), use_tqdm=False)
    assert [each.stats.num_cached_tokens for each in found] == [128, 0]
    assert rounds_of(found[0]) == rounds_of(found[1])


# --- trees


@pytest.fixture(scope="session")
def tree_llm(draft_at):
    """tree_llm(kind, **options): an engine that drafts a tree from each block."""

    def build(kind, **options):
        chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": TREE.num_levels}
        chosen |= {"top_k": TREE.top_k, "num_draft_tokens": TREE.num_nodes}
        return LLM("demo", chosen, **SIZES | options)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options", [(kind, {}) for kind in GROWING] + [("dspark", each) for each in OPTIONS[2:]]
)
def test_texts_are_those_of_plain_decoding_with_trees(tree_llm, plain, prompts, kind, options):
    llm = tree_llm(kind, **options)
    assert texts(llm, prompts, 16) == plain[:16]
    assert llm.engine.runner.num_tree_rounds > 3
    assert accepted_by(llm) > 2
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW[:2])
def test_the_draft_cache_has_no_hole_after_rounds_of_trees(
    tree_llm, block_llm, prompts, greedy, kind
):
    of_trees, scratch = tree_llm(kind, max_num_seqs=1), block_llm(kind, max_num_seqs=1)
    [output] = of_trees.generate(prompts[:1], greedy(60), use_tqdm=False)
    tokens = prompts[0] + output.outputs[0].token_ids
    scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    rows = [
        llm.engine.runner.draft_cache.transpose(3, 4).flatten(2, 3)[:, :, : len(tokens) - 1]
        for llm in (of_trees, scratch)
    ]
    assert torch.equal(*rows)
    assert output.stats.num_rounds < 45


def rounds_of(output):
    return [(list(each.draft_tokens), each.num_accepted) for each in output.stats.rounds]


@pytest.mark.parametrize(
    "kind, K, temperature",
    [
        ("masks propose", 3, 0.7),
        ("dflash2", 3, 0.7),
        ("peagle", 3, 0.7),
        *(
            pytest.param(kind, K, T, marks=pytest.mark.slow)
            for kind in KINDS
            for K in (1, 3, 5)
            for T in (0.0, 0.7, 1.0)
        ),
    ],
)
def test_drafts_are_the_naive_loops_round_by_round(
    draft_at, reference, prompts, kind, K, temperature
):
    chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": K}
    llm = LLM("demo", chosen, **SIZES | {"max_num_seqs": 3})
    naive = naive_parallel if kind.startswith("peagle") else naive_block
    cfg, weights = naive.read_draft(draft_at(kind), reference.num_layers)
    weights = borrow(cfg, weights, reference.weights)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=16, ignore_eos=True)
        for seed in range(2)
    ]
    outputs = llm.generate(prompts[1:3], params, use_tqdm=False)
    num_accepted = 0
    for seed, (output, prompt) in enumerate(zip(outputs, prompts[1:3], strict=True)):
        scores = sampled(temperature, seed) if temperature else by_logits
        given = reference, cfg, weights, prompt, 16, K, scores
        run = naive_block.generate(*given, propose=naive.propose)
        assert output.outputs[0].token_ids == run.tokens
        rounds = rounds_of(output)
        assert [drafts for drafts, _ in rounds] == run.drafts
        assert [count for _, count in rounds[:-1]] == run.num_accepted[:-1]
        num_accepted += sum(run.num_accepted)
    assert kind in ("dflash", "rnn") or num_accepted > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masks propose", "peagle"])
def test_a_prefix_hit_gives_the_drafts_of_a_miss(block_llm, prompts, greedy, kind):
    long = [token for prompt in prompts for token in prompt][:135]
    asked = [long, long[:-3], [*long[:130], 5, 6, 7]]
    miss, hit = (block_llm(kind, enable_prefix_caching=has_cache) for has_cache in (False, True))
    expected = miss.generate(asked, greedy(12), use_tqdm=False)
    hit.generate([long], greedy(12), use_tqdm=False)
    found = hit.generate(asked, greedy(12), use_tqdm=False)
    assert [output.stats.num_cached_tokens for output in found] == [128] * 3
    assert list(map(rounds_of, found)) == list(map(rounds_of, expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masks propose", "peagle"])
def test_preempted_requests_draw_and_draft_what_they_would_have(block_llm, prompts, kind):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24, repetition_penalty=1.3)
    batch = [prompts[i] for i in (0, 2, 3, 5)]  # 49 tokens each
    crowded, roomy = (block_llm(kind, 3, num_kv_blocks=n, max_num_seqs=4) for n in (3, 40))
    expected = roomy.generate(batch, params, use_tqdm=False)
    found = crowded.generate(batch, params, use_tqdm=False)
    assert sum(output.stats.num_preemptions for output in found) >= 2
    assert [(o.outputs[0].token_ids, rounds_of(o)) for o in found] == [
        (o.outputs[0].token_ids, rounds_of(o)) for o in expected
    ]


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dspark", "peagle")]


@pytest.mark.parametrize("kind", ["masks propose", *OTHERS])
def test_a_text_may_end_with_the_context_inside_a_block(block_llm, demo_llm, prompts, kind):
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    sizes = {"max_model_len": 61, "max_num_seqs": 2}
    expected = demo_llm(None, **sizes).generate(prompts[:1], params, use_tqdm=False)
    found = block_llm(kind, **sizes).generate(prompts[:1], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [len(o.outputs[0].token_ids) for o in found] == [61 - len(prompts[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, adapts",
    [(kind, adapts) for kind in FEW for adapts in (False, True)]
    + [(kind, "trees") for kind in FEW[:2]],
)
def test_the_draft_cache_is_an_extension_of_the_committed_tokens(
    draft_at, adapting, prompts, greedy, kind, adapts
):
    """Of plain rounds too, and of blocks of any length that are verified or not."""
    chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": 5}
    after_rounds, scratch = (LLM("demo", chosen, **SIZES | {"max_num_seqs": 1}) for _ in range(2))
    if adapts:
        tree, wide = (TREE, [(1, "tree"), (1, "tree"), (1, 3), (4, "tree")])
        after_rounds = adapting(kind, max_num_seqs=1, tree=tree if adapts == "trees" else None)
        plans = [(1, 0), (1, 3), (2, 5), (6, 0), (1, 0), (1, 5), (4, 3)]
        planned(after_rounds, [*plans, *(wide if adapts == "trees" else ())] * 6)
    [output] = after_rounds.generate([prompts[0]], greedy(40), use_tqdm=False)
    tokens = prompts[0] + output.outputs[0].token_ids
    scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    rows = [
        llm.engine.runner.draft_cache.transpose(3, 4).flatten(2, 3)[:, :, : len(tokens) - 1]
        for llm in (after_rounds, scratch)
    ]
    assert torch.equal(*rows)
    assert output.stats.num_rounds < (40 if adapts else 30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "dflash2", "peagle"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_pq_rules_keep_greedy_texts_beside_sampled_ones(draft_at, prompts, plain, rule, kind):
    chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": 3, "acceptance": rule}
    llm = LLM("demo", chosen, **SIZES | {"max_num_seqs": 3})
    outputs = llm.generate(prompts[:2], [mixed(0), mixed(1)], use_tqdm=False)
    assert [each.token_ids for each in outputs[0].outputs] == plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("shift, expected", [(0, {5}), (1, {0})])
def test_oracle_blocks_are_accepted_and_garbage_is_not(
    draft_at, demo_llm, prompts, greedy, monkeypatch, kind, shift, expected
):
    """The draft runs its blocks; what it proposes is replaced."""
    chosen = {"model": str(draft_at(kind)), "num_speculative_tokens": 5}
    llm = LLM("demo", chosen, **SIZES | {"max_num_seqs": 3})
    asked = prompts[:3], greedy(43)
    known = [o.outputs[0].token_ids for o in demo_llm(None).generate(*asked, use_tqdm=False)]
    runner = llm.engine.runner
    wrong = [[(token + shift) % 4096 for token in tokens] for tokens in known]
    scripts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wrong, strict=False)]
    draft = runner.acts.draft
    script, real = ScriptedDraft(runner, scripts, 5), draft.propose

    def propose(step):
        real(step)
        script.propose(step)

    monkeypatch.setattr(draft, "propose", propose)
    outputs = llm.generate(*asked, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == known
    assert {count for o in outputs for count in o.stats.num_accepted} == expected


# --- graphs


def build(kind, backend, is_eager=False, dtype=torch.float32, K=5, is_adaptive=False, tree=None):
    device = torch.device("cpu" if backend == "tape" else "cuda")
    captures = None if is_eager else TapeBackend() if backend == "tape" else CudaBackend(device)
    directory = demo_directory("target")
    target = load_target(directory, dtype=dtype, device=device, progress=False)
    draft = load_eagle(kind, target, device=device, progress=False)
    sizes = EngineSizes(
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_kv_blocks=12,
        num_speculative_tokens=K,
        is_adaptive=is_adaptive,
        tree=tree,
        block_rows=draft.config.block_rows(K),
    )
    graphs = GraphConfig(request_sizes=(2, 4), token_sizes=(48,))
    runner = Runner(target, draft, sizes, device, graph_config=graphs, backend=captures)
    runner.capture()
    config = dataclasses.replace(target.config, eos_token_ids=())
    with rows_are_shared(COSTS):
        engine = assemble(runner, config, Tokenizer(directory), is_async=False)
    if is_adaptive:
        at_random(SimpleNamespace(engine=engine, sizes=sizes), random.Random(5), share=1.0)
    return engine


def run(engine, requests):
    added = engine.add_requests(requests)
    while engine.has_unfinished:
        engine.step()
    outputs = [whole_output(request) for request in added]
    return [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs]


ALIKE = dataclasses.replace(TREE, smaller=())
WAYS = {}, {"is_adaptive": True}, {"is_adaptive": True, "tree": TREE}, {"tree": ALIKE}
DTYPES = {"tape": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}
BACKENDS = ["tape", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind, way",
    [
        pytest.param(kind, way, marks=pytest.mark.slow)
        for kind in KINDS
        for way in WAYS
        if "tree" not in way or kind in GROWING
    ],
)
def test_graphs_change_no_token_and_no_draft(draft_at, prompts, greedy, backend, kind, way):
    """Batches shrink as requests end, and some are drawn."""
    lengths = (9, 14, 18, 12, 6)
    asked = [
        (prompts[i], greedy(n) if i % 2 else dataclasses.replace(mixed(7), max_tokens=n))
        for i, n in enumerate(lengths)
    ]
    for dtype in DTYPES[backend]:
        how = {"dtype": dtype, **way}
        captured = build(draft_at(kind), backend, **how)
        found = run(captured, asked)
        assert found == run(build(draft_at(kind), backend, is_eager=True, **how), asked)
        counters = captured.runner.graphs.counters()
        of_rounds = "draft_prefill", "draft_decode", "target_decode"
        for family in of_rounds:
            assert counters[family].replays[CUDAGraphMode.FULL] > 3, family
        has_extend = kind.startswith("peagle") and "is_adaptive" in way
        assert ("draft_extend" in counters) == has_extend
        alone = of_rounds[1:] if "is_adaptive" in way else ()  # without prompts all are replayed
        modes = {batch.mode for family in alone for batch in counters[family].batches}
        assert CUDAGraphMode.NONE not in modes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FEW)
def test_texts_on_a_gpu_are_those_of_plain_decoding(draft_at, prompts, kind):
    """By the default options, in bfloat16."""
    sizes = {"max_num_seqs": 24, "max_model_len": 256, "num_kv_blocks": 96}
    chosen = {"model": str(draft_at(kind))}
    drafting, alone = LLM("demo", chosen, **sizes), LLM("demo", **sizes)
    for batch in (24, 5):
        assert texts(drafting, prompts, 24, batch) == texts(alone, prompts, 24, batch)
    assert accepted_by(drafting) > 3
