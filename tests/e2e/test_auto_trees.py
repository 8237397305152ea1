"""Chains and trees from step to step in one engine: no token depends on which, whatever the order.

Planners are told what to choose, at random or by a list, since their own choice needs a GPU.
"""

import itertools
import random
import time
from dataclasses import replace

import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import LLM, SamplingParams, sizes
from specdec.requests.metrics import Counter
from specdec.rounds.step_sizes import Proposal
from specdec.scheduling.costs import StepCosts
from specdec.scheduling.outcomes import shown_by_chains, shown_by_trees
from specdec.scheduling.planner import RoundPlan
from specdec.sizes import BLOCK_SIZE, TreeShape, chain
from specdec.start import load
from specdec.start.speculation import AUTO_TREE
from tests.e2e.caches import cache_rows, poison_nodes
from tests.shared_rows import at_random, rows_are_shared
from tests.soak import soak

COSTS = StepCosts(rounds=((512, 1.0),), plain=((64, 1.0),), level=((64, 0.01),))
SMALL = TreeShape(num_levels=4, top_k=3, num_nodes=9, smaller=((3, 4, 6), (5, 2, 3)))
OF_ALL = replace(SMALL, smaller=())
OF_TWO = replace(SMALL, smaller=((2, 2, 6),))
FLAT = TreeShape(num_levels=2, top_k=3, num_nodes=7, smaller=((2, 2, 4),))  # has few graphs
TREE, CHAIN, FEW, PLAIN = "tree", "chain", "few", "plain"
NUM_TOKENS = 14
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "bad_words": [" self", "import"], "presence_penalty": 0.6},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1, "num_speculative_tokens": 2},
    {"temperature": 0.0, "speculate": False},
    {"temperature": 0.8, "min_tokens": 9, "stop_token_ids": [200], "frequency_penalty": 0.4},
]


@pytest.fixture(scope="module")
def prompts(prompts):
    """The short ones: 49, 25, 49, 49, 25, 49 tokens, ..."""
    return [prompt for prompt in prompts if len(prompt) < 64]


@pytest.fixture
def make(monkeypatch):
    """make(tree=SMALL, backend=None, **options): an engine on a CPU that has both."""

    def build(tree=SMALL, backend=None, draft="demo", threshold=None, **options):
        if backend is not None:
            monkeypatch.setattr(load, "graph_backend", lambda *_: backend)
        speculation = {"model": draft, "draft_confidence_threshold": threshold}
        if tree is not None:
            speculation["num_speculative_tokens"] = tree.num_levels
        given = {"max_num_seqs": 6, "max_model_len": 320, "device": "cpu"} | options
        with rows_are_shared(COSTS, tree):
            llm = LLM("demo", speculation, **given)
        assert llm.sizes.has_both
        return llm

    return build


def planned(llm, kinds):
    """What the next steps propose, the last kind again and again; returns what was proposed."""
    left, proposed = list(kinds), []
    K = llm.sizes.num_speculative_tokens

    def plan(coming):
        kind = left.pop(0) if len(left) > 1 else left[0]
        if kind == TREE and coming.tree is None:
            kind = CHAIN
        proposed.append(kind)
        rows = {TREE: 1, CHAIN: K + 1, FEW: 2, PLAIN: 1}[kind] * coming.num_requests
        shapes = {TREE: coming.tree, CHAIN: chain(K), FEW: chain(2), PLAIN: chain(0)}
        return RoundPlan(rows, shapes[kind])

    llm.engine.planner.plan = plan
    return proposed


def by_chance(seed, count=400):
    chance = random.Random(seed)
    return [chance.choice([TREE, TREE, CHAIN, FEW, PLAIN]) for _ in range(count)]


def all_kinds(has_draft=True):
    """Requests that ask for everything."""
    own = ("num_speculative_tokens", "speculate")
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS - i % 3,
            ignore_eos=True,
            **({"seed": i} if values["temperature"] else {}),
            **{name: value for name, value in values.items() if has_draft or name not in own},
        )
        for i, values in enumerate(KINDS)
    ]


def texts(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.drain()
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(prompts):
    """What plain decoding says to `all_kinds`."""
    llm = LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu")
    return texts(llm, prompts[:6], all_kinds(has_draft=False))


@pytest.mark.parametrize(
    "draft, tree, options",
    [
        ("demo/eagle3", None, {"async_scheduling": True}),
        ("demo/eagle1", SMALL, {"max_num_batched_tokens": 40, "async_scheduling": True}),
        ("demo/eagle3", SMALL, {"num_kv_blocks": 5, "threshold": 0.3}),
    ],
)
def test_texts_are_those_of_plain_decoding(make, expected, prompts, draft, tree, options):
    llm = make(tree, draft=draft, **options)
    proposed = planned(llm, by_chance(3))
    assert texts(llm, prompts[:6], all_kinds()) == expected
    assert set(proposed) == {TREE, CHAIN, FEW, PLAIN}
    shown = llm.engine.planner.statistics
    assert 0.1 < shown.tree_share < 0.6
    counted = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    assert counted["specdec:tree_rounds"] == sum(
        n for shape, n in shown.rounds.items() if shape.is_wide
    )


def test_trees_are_for_few_requests(make, expected, prompts, monkeypatch):
    monkeypatch.setattr(sizes, "MAX_AUTO_TREE_REQUESTS", 2)
    llm = make(max_num_batched_tokens=60, async_scheduling=True)
    assert llm.engine.runner.buffers.path_starts.shape == (2,)
    seen = []
    real = llm.engine.runner.run_step

    def run_step(rows, parts, **options):
        seen.append((len(rows) + len(parts), options["next_shape"].is_wide))
        return real(rows, parts, **options)

    monkeypatch.setattr(llm.engine.runner, "run_step", run_step)
    planned(llm, [TREE])
    assert texts(llm, prompts[:6], all_kinds()) == expected
    assert max(count for count, is_tree in seen if is_tree) == 2
    assert {is_tree for _, is_tree in seen} == {True, False}


def test_times_are_those_of_what_was_drafted_before_a_step(make, prompts, monkeypatch):
    """While a step's target runs, the drafts that it verifies have just been made."""
    llm = make(async_scheduling=True)
    planned(llm, [TREE, CHAIN] * 40)
    seen = []
    monkeypatch.setattr(llm.engine.planner, "observe_time", lambda size, *_: seen.append(size))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm.generate(prompts[:2], greedy, use_tqdm=False)
    assert {each.shape for each in seen} == {SMALL.of(2).drafts, chain(4)}
    rows = {each.num_rows // each.num_requests for each in seen if each.shape.width > 1}
    assert rows == {SMALL.num_rows}


@pytest.mark.parametrize(
    "tree, token_sizes, most",
    [
        pytest.param(FLAT, [56], 2, marks=pytest.mark.slow),
        pytest.param(OF_TWO, [60], 2, marks=pytest.mark.slow),
        pytest.param(SMALL, [90], 6, marks=pytest.mark.slow),
        *(
            pytest.param(tree, sizes, 2, marks=pytest.mark.slow)
            for tree, sizes in ((SMALL, [60]), (SMALL, [40, 60]), (None, [40, 60]))
        ),
    ],
)
def test_graphs_replay_what_runs_eagerly(make, prompts, replayed, tree, token_sizes, most):
    """Padded sizes, shrinking batches, prompts in pieces; the same drafts too.

    most: requests at a time; with 6 trees are of many, and at the end of few
    """
    found = []
    for backend in (None, TapeBackend()):
        graphs = {"cuda_graph_sizes": [most], "cuda_graph_token_sizes": token_sizes}
        sizes = {"max_num_seqs": most, "max_num_batched_tokens": 40, "async_scheduling": False}
        llm = make(tree, backend=backend, **sizes, **(graphs if backend else {}))
        planned(llm, by_chance(5))
        count = max(most, 4)
        outputs = llm.generate(prompts[:count], all_kinds()[:count], use_tqdm=False)
        greedy = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 9, 14)]
        outputs += llm.generate(prompts[:3], greedy, use_tqdm=False)
        found.append([(each.outputs[0].token_ids, each.stats.rounds) for each in outputs])
    assert found[0] == found[1]
    counters = llm.graph_counters()
    shape = llm.sizes.tree
    for name in ("target_decode", "target_plain", "draft_prefill", "draft_decode"):
        assert counters[name].replays[CUDAGraphMode.FULL] > 0, name
        assert CUDAGraphMode.NONE not in counters[name].dispatches, name
    captured = [each.descriptor for each in counters["target_decode"].captures]
    widths = {(n, shape.of(n).num_rows) for n in llm.engine.runner.graphs.tree_sizes}
    assert widths == {(each.num_reqs, each.query_len) for each in captured if each.query_len}
    kinds = {Proposal(*each) for each in itertools.product((False, True), repeat=2)}
    for name in ("draft_prefill", "draft_decode"):
        assert {desc.kind for of, desc in replayed if of == name} == kinds, name
    rows = {desc.query_len for of, desc in replayed if of == "target_decode"}
    assert rows >= {None, *(n for _, n in widths)}


@pytest.mark.parametrize(
    "draft", ["demo/eagle3", pytest.param("demo/eagle1", marks=pytest.mark.slow)]
)
def test_caches_equal_a_prefill_of_the_committed_tokens(make, greedy, prompts, draft):
    llm, scratch = (make(draft=draft, max_num_seqs=1) for _ in range(2))
    order = [TREE, TREE, CHAIN, TREE, PLAIN, PLAIN, TREE, FEW, TREE, PLAIN, CHAIN, CHAIN, PLAIN]
    planned(llm, order * 5)
    poison_nodes(llm)
    [output] = llm.generate([prompts[1]], greedy(50), use_tqdm=False)
    tokens = prompts[1] + output.outputs[0].token_ids
    scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    for name in ("target_cache", "draft_cache"):
        mixed, prefill = (cache_rows(each, name, len(tokens) - 1) for each in (llm, scratch))
        assert torch.equal(mixed, prefill)
        assert mixed.abs().sum() > 0
    assert output.stats.num_accepted_tokens > 8
    nodes = {len(each.parents) for each in output.stats.rounds}
    assert {0, SMALL.num_nodes} <= nodes


def test_what_both_kinds_of_rounds_wrote_is_a_prefix(make, greedy, prompts):
    prompt = [token for prompt in prompts for token in prompt][:120]
    llm, fresh = make(), make(enable_prefix_caching=False)
    planned(llm, by_chance(7))
    [first] = llm.generate([prompt], greedy(20), use_tqdm=False)
    follow_up = prompt + first.outputs[0].token_ids + [11, 12]
    for each in (llm, fresh):
        planned(each, [TREE, CHAIN] * 30)
    hit, miss = (each.generate([follow_up], greedy(16), use_tqdm=False)[0] for each in (llm, fresh))
    assert hit.stats.num_cached_tokens == (120 + 20 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert hit.stats.rounds == miss.stats.rounds
    assert hit.stats.num_accepted_tokens > 3


@pytest.mark.slow
def test_smaller_trees_leave_the_rows_of_prompts_alone(make, greedy, prompts):
    """Prompts of which a few rows are left, beside 5 trees of 4 rows that might have paths of 5."""
    text = [token for prompt in prompts for token in prompt]
    cached = text[: BLOCK_SIZE + 1]
    batch = [text[b : b + 30] for b in range(5)] + [cached + text[n : 2 * n] for n in range(6)]
    params = [greedy(40)] * 5 + [greedy(5)] * 6
    llm, plain = make(), LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu")
    planned(llm, [TREE])
    for each in (llm, plain):
        each.generate([cached], greedy(1), use_tqdm=False)
    ours, theirs = (each.generate(batch, params, use_tqdm=False) for each in (llm, plain))
    tokens = [[each.outputs[0].token_ids for each in outputs] for outputs in (ours, theirs)]
    assert tokens[0] == tokens[1]
    assert [each.stats.num_cached_tokens for each in ours[5:]] == [BLOCK_SIZE] * 6
    assert llm.run_stats(ours).mean_acceptance_length > 1.7  # 2 levels, 3 nodes
    assert llm.engine.planner.statistics.tree_share > 0.9


@pytest.mark.slow
def test_guided_texts_are_those_of_plain_decoding(make, prompts):
    rules = [{"regex": r"(def|for) [a-z_]{3,9}\([a-z]{0,4}\):( [a-z]+)*"}, {"json": {}}]
    params = [
        SamplingParams(temperature=T, seed=5, max_tokens=NUM_TOKENS, structured_outputs=rule)
        for rule in rules
        for T in (0.0, 0.8)
    ]
    params.append(SamplingParams(temperature=0.8, seed=6, max_tokens=NUM_TOKENS))
    plain = LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu")
    llm = make(async_scheduling=True)
    planned(llm, by_chance(8))
    assert texts(llm, prompts[:5], params) == texts(plain, prompts[:5], params)


def test_the_end_of_the_context_is_reached(make, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    text = [token for prompt in prompts for token in prompt]
    batch = [text[start : start + length] for start, length in enumerate((300, 311, 318))]
    plain = LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu")
    llm = make(async_scheduling=True)
    planned(llm, by_chance(2))
    found = texts(llm, batch, params)
    assert found == texts(plain, batch, params)
    assert [len(tokens) for tokens, _ in found] == [20, 9, 2]


def test_rounds_of_one_kind_are_those_of_engines_that_have_no_other(make, prompts):
    """Chains of as many rows as there are drafts; trees of a fixed shape."""
    params = all_kinds()[:2]
    fixed = {"model": "demo", "num_speculative_tokens": SMALL.num_levels, "adaptive": False}
    shape = {"top_k": SMALL.top_k, "num_draft_tokens": SMALL.num_nodes}
    for kind, draft in ((CHAIN, fixed), (TREE, fixed | shape)):
        llm = make(max_num_seqs=2)
        planned(llm, [kind])
        other = LLM("demo", draft, max_num_seqs=2, max_model_len=320, device="cpu")
        ours, theirs = (each.generate(prompts[:2], params, use_tqdm=False) for each in (llm, other))
        assert [each.stats.rounds for each in ours] == [each.stats.rounds for each in theirs]


def test_with_a_top_k_of_1_all_drafts_are_chains(make, prompts):
    draft = {"model": "demo", "num_speculative_tokens": "auto"}
    params = all_kinds()[:3]
    found = []
    for top_k in (1, None):
        with rows_are_shared(COSTS):
            given = {"max_num_seqs": 3, "max_model_len": 320, "device": "cpu"}
            llm = LLM("demo", draft | {"top_k": top_k}, **given)
        assert llm.sizes.has_both == (top_k is None)
        at_random(llm, random.Random(9), share=0.0)
        outputs = llm.generate(prompts[:3], params, use_tqdm=False)
        found.append([each.stats.rounds for each in outputs])
    assert llm.sizes.tree == AUTO_TREE
    assert found[0] == found[1]  # these costs have none of trees


@pytest.mark.parametrize(
    "backend, count",
    [
        ("eager", 4),
        pytest.param("eager", 300, marks=pytest.mark.slow),
        pytest.param("tape", 150, marks=pytest.mark.slow),
        pytest.param("cuda", 60, marks=pytest.mark.gpu),
    ],
)
def test_random_requests_give_what_each_gives_alone(monkeypatch, backend, count):
    if backend == "tape":
        monkeypatch.setattr(load, "graph_backend", lambda *_: TapeBackend())
    device = "cuda" if backend == "cuda" else "cpu"
    result = soak(count, 11, device, is_adaptive=True, has_trees=True)
    assert result["faults"] == []
    assert result["rounds"] > count


@pytest.mark.gpu
@pytest.mark.usefixtures("no_late_compilation")
@pytest.mark.parametrize("draft", ["demo/eagle3", "demo/eagle1"])
def test_on_a_gpu_texts_are_those_of_plain_decoding(prompts, draft):
    sizes = {"max_num_seqs": 12, "max_model_len": 320, "device": "cuda"}
    llm, plain = LLM("demo", {"model": draft}, **sizes), LLM("demo", **sizes)
    planner = llm.engine.planner
    assert llm.sizes.has_both
    assert [n for n, _ in planner._costs.tree.all_levels] == [1, 2, 4, 6, 8]
    expected = texts(plain, prompts[:6], all_kinds(has_draft=False))
    assert texts(llm, prompts[:6], all_kinds()) == expected  # as it pays
    proposed = planned(llm, by_chance(3))
    assert texts(llm, prompts[:6], all_kinds()) == expected
    assert set(proposed) == {TREE, CHAIN, FEW, PLAIN}
    planned(llm, [TREE])  # 12 at a time have chains
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    both = (each.generate(prompts[:24], greedy, use_tqdm=False) for each in (llm, plain))
    ours, theirs = ([output.outputs[0].token_ids for output in each] for each in both)
    assert ours == theirs


def chains_seen(llm, kinds, prompts, params):
    """What the planner is told of each round's chains, by prompt and tokens before it."""
    planned(llm, kinds)
    feedback, seen = llm.engine.feedback, {}
    real = feedback._outcome

    def outcome(work, shape, result):
        found = real(work, shape, result)
        if shape.is_wide:
            _, chains = shown_by_trees([found], llm.sizes.num_speculative_tokens)
        else:
            chains = shown_by_chains([found])
        pairs = zip(work.verifying, found.num_allowed, strict=True)
        for i, request in enumerate(request for request, allowed in pairs if allowed):
            assert chains.num_allowed[i] <= request.num_speculative_tokens
            at = tuple(request.prompt_token_ids), request.num_tokens
            numbers = chains.num_shown[i], chains.num_accepted[i]
            seen[at] = chains.held[i], *map(int, numbers)
        return found

    feedback._outcome = outcome
    llm.engine.planner.observe = lambda *_: None  # the draft's own probabilities stay
    llm.generate(prompts, params, use_tqdm=False)
    return seen


@pytest.mark.parametrize(
    "draft, num_tokens",
    [
        pytest.param("demo/eagle3", 24, marks=pytest.mark.slow),
        pytest.param("demo/eagle3", 60, marks=pytest.mark.slow),
        pytest.param("demo/eagle1", 60, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_trees_show_the_chains_in_them(make, prompts, draft, num_tokens):
    """Paths are as probable as in rounds of chains after the same tokens, and as many hold."""
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=7,
            num_speculative_tokens=K,
        )
        for temperature, K in ((0.0, 4), (0.8, 4), (0.0, 3), (0.8, None), (0.0, 4), (0.8, 2))
    ]
    of_trees, of_chains = (
        chains_seen(make(OF_ALL, draft=draft), [kind], prompts[:6], params)
        for kind in (TREE, CHAIN)
    )
    both = of_trees.keys() & of_chains.keys()
    assert len(both) > num_tokens
    lengths = []
    for at in both:
        (said, length, held), (expected, num_shown, num_held) = of_trees[at], of_chains[at]
        assert 2 <= num_shown <= 4
        assert said[:length] == pytest.approx(expected[:length], rel=1e-3)
        assert not said[length:].any()
        assert held == min(num_held, length)
        lengths.append(length)
    assert len(set(lengths)) > 1, "some trees have nodes of other paths instead"
    assert sum(held for _, _, held in of_trees.values()) > 0.5 * len(of_trees)


def test_grammars_follow_the_nodes_that_have_rows(make, prompts):
    """Six requests verify fewer nodes of each tree than were drafted, and then fewer requests."""
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2),
            seed=i,
            max_tokens=8 + 4 * i,
            structured_outputs={"regex": r"( ?[a-z_]+[(,.=)]?\n?){20}"},
        )
        for i in range(6)
    ]
    plain = LLM("demo", max_num_seqs=6, max_model_len=320, device="cpu")
    llm = make()
    planned(llm, [TREE])
    outputs = llm.generate(prompts[:6], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [
        each.outputs[0].token_ids for each in plain.generate(prompts[:6], params, use_tqdm=False)
    ]
    assert llm.engine.planner.statistics.tree_share > 0.8
    assert sum(each.stats.num_accepted_tokens for each in outputs) > 20


@pytest.mark.gpu
def test_on_a_gpu_one_request_goes_on_with_what_pays(prompts, greedy):
    """By its own measures: trees, chains and plain rounds all run, and most are of one kind."""
    llm = LLM("demo", {"model": "demo/eagle1"}, max_num_seqs=4, max_model_len=2048, device="cuda")
    start = time.perf_counter()
    for prompt in prompts[:2]:
        llm.generate([prompt], greedy(1500), use_tqdm=False)
    seconds = time.perf_counter() - start
    shown = llm.engine.planner.statistics
    assert 0 < shown.tree_share < 1
    # The host cannot always keep up with steps this small, and not at all beside other processes,
    # so they may take longer than foretold; but all of them together no longer than the run.
    assert 0.5 * shown.predicted_ms < shown.measured_ms < 1e3 * seconds
