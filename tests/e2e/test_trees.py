"""Draft trees by the whole engine: the pair's figures, the naive tree, plain decoding's text."""

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec import LLM, SamplingParams
from specdec.kernels import move_slots
from specdec.kernels.attention import launch, launch_plan
from specdec.kernels.attention.wide_walk import WideWalk
from specdec.requests.draft_tree import depths
from specdec.rounds import commit, fill, gather_paths, propose
from specdec.rounds import prompts as prompt_rows
from specdec.sampler import process_logits, row_parameters
from tests.e2e.caches import cache_rows, poison_nodes
from tests.naive_eagle import borrow, read_draft
from tests.naive_tree import GREEDY, Sampling, Shape, TreeDecoding
from tests.reference import Reference
from tests.soak import soak
from weights.demo import demo_directory, demo_prompts

TAPS = {"eagle3": (2, 4, 5), "eagle1": ()}
SAMPLED = Sampling(temperature=0.7, seed=2**40 + 7)


def tree_of(draft, shape, threshold=None):
    """A speculative_config. shape: as tests/naive_tree.py has it."""
    return {
        "model": f"demo/{draft}",
        "num_speculative_tokens": shape.num_levels,
        "top_k": shape.top_k,
        "num_draft_tokens": shape.num_rows - 1,
        "adaptive": False,
        "draft_confidence_threshold": threshold,
    }


@pytest.fixture(scope="module")
def tree_llm():
    """tree_llm(draft, shape, **options): an engine on the CPU, kept for the module."""
    known = {}

    def build(draft, shape, **options):
        key = (draft, shape, *options.items())
        if key not in known:
            sizes = {"max_num_seqs": 24, "max_model_len": 512, "device": "cpu"}
            known[key] = LLM("demo", tree_of(draft, shape), **{**sizes, **options})
        return known[key]

    return build


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def accepted_at(outputs, num_tokens, num_levels):
    """Rounds that accepted a node of each depth, up to the last token asked for; and all rounds."""
    counts = []
    for output in outputs:
        left = num_tokens - 1  # the first token is in no round
        for count in output.stats.num_accepted:
            counts.append(min(count, left))
            left -= count + 1
    return len(counts), [sum(c >= depth for c in counts) for depth in range(1, num_levels + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5, 24])
@pytest.mark.parametrize(
    "draft, shape, num_rounds, accepted",
    [
        ("eagle3", Shape(8, 6, 4), 1124, [888, 641, 458, 339, 216, 168]),
        ("eagle3", Shape(16, 6, 4), 1086, [861, 637, 467, 356, 241, 187]),
        ("eagle3", Shape(32, 8, 8), 1024, [801, 602, 443, 336, 244, 184, 107, 93]),
        ("eagle1", Shape(8, 6, 4), 889, [802, 619, 493, 408, 340, 283]),
        ("eagle1", Shape(16, 6, 4), 799, [738, 636, 507, 439, 379, 337]),
        ("eagle1", Shape(32, 8, 8), 666, [635, 561, 472, 398, 337, 302, 249, 216]),
    ],
)
def test_the_demo_pair_reaches_its_figures(
    tree_llm, greedy, prompts, references, draft, shape, num_rounds, accepted, batch
):
    llm = tree_llm(draft, shape)
    outputs = [
        output
        for start in range(0, 24, batch)
        for output in llm.generate(prompts[start : start + batch], greedy(160), use_tqdm=False)
    ][:24]
    assert tokens_of(outputs) == references
    assert accepted_at(outputs, 160, shape.num_levels) == (num_rounds, accepted)


@pytest.mark.parametrize(
    "draft, shape, num_rounds, accepted",
    [
        ("eagle3", Shape(8, 6, 4), 17, [16, 13, 11, 3, 2, 2]),
        pytest.param(
            *("eagle1", Shape(16, 6, 4), 16, [14, 13, 8, 6, 4, 2]), marks=pytest.mark.slow
        ),
    ],
)
def test_two_short_prompts_reach_their_figures(
    tree_llm, greedy, prompts, references, draft, shape, num_rounds, accepted
):
    llm = tree_llm(draft, shape)
    outputs = llm.generate(prompts[1:3], greedy(32), use_tqdm=False)
    assert tokens_of(outputs) == [reference[:32] for reference in references[1:3]]
    assert accepted_at(outputs, 32, shape.num_levels) == (num_rounds, accepted)


class Recorder:
    """What one request's rounds do: the trees that are drafted, and the walks through them."""

    def __init__(self, runner, monkeypatch):
        self.drafted, self.walks = [], []
        buffers, tree = runner.buffers, runner.buffers.candidates
        real = runner.acts.run

        def run(step):
            real(step)
            if step.shape.is_wide:
                self.walks.append(buffers.accepted_rows[0].tolist())
            found = tree.tokens[0], tree.places[0], tree.scores[0], runner.state.draft_tokens[0]
            self.drafted.append([x.tolist() for x in (*found, runner.state.draft_parents[0])])

        monkeypatch.setattr(runner.acts, "run", run)


@pytest.fixture(scope="module")
def naive():
    """naive(draft, prompt, shape, sampling): the independent tree over the demo pair."""
    target = Reference(demo_directory("target"))

    def decode(draft, prompt, shape, sampling):
        cfg, own = read_draft(demo_directory(draft), TAPS[draft])
        weights = borrow(cfg, own, target.weights)
        return TreeDecoding(target, cfg, weights, prompt, shape, sampling)

    return decode


@pytest.mark.parametrize(
    "draft, index, shape, sampling",
    [
        ("eagle3", 1, Shape(8, 6, 4), GREEDY),
        ("eagle1", 2, Shape(16, 4, 3), GREEDY),
        ("eagle3", 2, Shape(16, 5, 4), SAMPLED),
        pytest.param("eagle1", 1, Shape(12, 4, 4), SAMPLED, marks=pytest.mark.slow),
    ],
)
def test_every_round_equals_the_naive_tree(
    naive, prompts, monkeypatch, draft, index, shape, sampling
):
    llm = LLM("demo", tree_of(draft, shape), max_num_seqs=1, max_model_len=256, device="cpu")
    seen = Recorder(llm.engine.runner, monkeypatch)
    params = SamplingParams(
        temperature=sampling.temperature, seed=sampling.seed, max_tokens=24, ignore_eos=True
    )
    [output] = llm.generate([prompts[index]], params, use_tqdm=False)
    decoding = naive(draft, prompts[index], shape, sampling)
    assert len(seen.walks) == output.stats.num_rounds
    for drafted, walked in zip(seen.drafted, seen.walks, strict=False):
        each = decoding.round()
        tokens, parents, scores, kept_tokens, kept_parents = drafted
        assert tokens == [node.token for node in each.tree.nodes]
        assert parents == [node.parent for node in each.tree.nodes]
        assert scores == pytest.approx([node.score for node in each.tree.nodes], abs=1e-4)
        rows = each.tree.rows()
        assert kept_tokens == [node.token for node in rows]
        assert kept_parents == [node.parent for node in rows]
        accepted = [each.tree.kept.index(node) + 1 for node in each.walk]
        assert walked == [0, *accepted, *[-1] * (shape.num_levels - len(accepted))]
    assert output.outputs[0].token_ids == decoding.tokens[len(prompts[index]) :][:24]
    assert max(map(len, map(set, seen.walks))) > 3


KINDS = [
    {},
    {"top_p": 0.9},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3, "top_p": 0.95},
    {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"logit_bias": {200: -3.0, 13: 2.0}, "temperature": 1.3},
    {"bad_words": [" self", "import", "(self"], "temperature": 0.5},
    {"temperature": 0.0, "bad_words": [" self", "return", "def"], "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 2, "temperature": 0.7, "top_k": 20},
    {"min_tokens": 11, "stop_token_ids": [200], "temperature": 0.8},
]


def run_all_kinds(llm, count=12, num_tokens=11, change=lambda index: {}):
    """(tokens, logprobs) of requests that ask for everything, and the acceptance length."""
    base = {"temperature": 1.0, "max_tokens": num_tokens, "ignore_eos": True}
    prompts = [prompt for prompt in demo_prompts()["prompts"] if len(prompt) < 64]
    params = [
        SamplingParams(**base | {"seed": i} | KINDS[i % len(KINDS)] | change(i))
        for i in range(count)
    ]
    outputs = llm.generate(
        [prompts[i % len(prompts)] for i in range(count)], params, use_tqdm=False
    )
    llm.engine.drain()
    assert llm.engine.scheduler.pool.num_free == llm.sizes.num_kv_blocks
    found = [(each.outputs[0].token_ids, logprobs_of(each)) for each in outputs]
    return found, llm.run_stats(outputs).mean_acceptance_length


def logprobs_of(output):
    rows = output.outputs[0].logprobs or []
    return [{token: (round(x.logprob, 4), x.rank) for token, x in row.items()} for row in rows]


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says to run_all_kinds."""
    llm = LLM("demo", max_num_seqs=12, max_model_len=256, device="cpu")
    return run_all_kinds(llm)[0]


@pytest.mark.parametrize(
    "draft, shape, options",
    [
        ("eagle1", Shape(16, 4, 4), {"max_num_seqs": 5, "async_scheduling": True}),
        pytest.param("eagle3", Shape(8, 6, 4), {}, marks=pytest.mark.slow),
        pytest.param("eagle3", Shape(32, 8, 8), {}, marks=pytest.mark.slow),
        pytest.param("eagle1", Shape(32, 8, 8), {}, marks=pytest.mark.slow),
        pytest.param("eagle3", Shape(7, 1, 8), {}, marks=pytest.mark.slow),
        pytest.param("eagle3", Shape(5, 4, 2), {"max_num_seqs": 1}, marks=pytest.mark.slow),
        pytest.param("eagle1", Shape(8, 6, 4), {"num_kv_blocks": 5}, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_plain_decoding_whatever_requests_ask_for(plain, draft, shape, options):
    sizes = {"max_num_seqs": 12, "max_model_len": 256, "device": "cpu"}
    found, mean = run_all_kinds(LLM("demo", tree_of(draft, shape), **{**sizes, **options}))
    assert found == plain
    assert mean > 1.5


@pytest.mark.parametrize(
    "draft, shape, threshold, count",
    [
        ("eagle1", Shape(16, 4, 4), 0.3, 4),
        *(
            pytest.param(draft, shape, threshold, 12, marks=pytest.mark.slow)
            for draft in ("eagle1", "eagle3")
            for shape in (Shape(16, 6, 4), Shape(6, 5, 1), Shape(5, 4, 2))
            for threshold in (0.2, 0.3, 0.5, 0.7)
        ),
    ],
)
def test_drafts_that_stop_change_no_text(plain, draft, shape, threshold, count):
    """Of trees and chains; what was not drafted is neither verified nor counted."""
    sizes = {"max_num_seqs": 5, "max_model_len": 256, "device": "cpu", "async_scheduling": True}
    means, levels = [], set()
    for each in (None, threshold):
        llm = LLM("demo", tree_of(draft, shape, each), **sizes)
        record_levels(llm.engine.runner, levels)
        texts, mean = run_all_kinds(llm, count)
        assert texts == plain[:count]
        means.append(mean)
    assert 1.1 < means[1] < means[0] + 0.2  # rounds begin at other tokens
    assert len(levels - {0}) > 1  # 0: those of the first engine


def record_levels(runner, levels):
    """All numbers of levels that slots have drafted."""
    real = runner.acts.decode_draft

    def decode_draft(step):
        real(step)
        rows = runner.buffers.sample_mapping[: step.num_reqs]
        levels.update(runner.buffers.draft_levels[: step.num_reqs][rows >= 0].tolist())

    runner.acts.decode_draft = decode_draft


PARTS = {"max_num_batched_tokens": 40, "async_scheduling": True, "max_num_seqs": 3}


def test_prompts_in_parts_beside_trees_change_no_text(plain, tree_llm):
    assert run_all_kinds(tree_llm("eagle3", Shape(12, 4, 4), **PARTS), 4)[0] == plain[:4]


@pytest.mark.slow
def test_prompts_in_parts_beside_trees_change_no_round(plain, tree_llm):
    shape = Shape(12, 4, 4)
    mean = run_all_kinds(tree_llm("eagle3", shape))[1]
    for parts in (PARTS, PARTS | {"max_num_batched_tokens": 7}):
        assert run_all_kinds(tree_llm("eagle3", shape, **parts)) == (plain, mean)


def test_a_request_bounds_its_own_depth(plain, tree_llm):
    def bounded(index):
        return {"num_speculative_tokens": index % 5} if index % 3 else {"speculate": False}

    llm = tree_llm("eagle3", Shape(12, 4, 4))
    assert run_all_kinds(llm, 4, change=bounded)[0] == plain[:4]
    params = [
        SamplingParams(temperature=0, max_tokens=16, num_speculative_tokens=bound)
        for bound in (1, 3)
    ]
    outputs = llm.generate([demo_prompts()["prompts"][1]] * 2, params, use_tqdm=False)
    assert [max(output.stats.num_accepted) for output in outputs] == [1, 3]
    assert [set(output.stats.num_levels) for output in outputs] == [{1}, {3}]
    alone = SamplingParams(temperature=0, max_tokens=8, speculate=False)
    [output] = llm.generate([demo_prompts()["prompts"][1]], alone, use_tqdm=False)
    assert (output.stats.num_drafted_tokens, output.stats.num_rounds) == (0, 7)


@pytest.mark.parametrize("room", [2, 5, pytest.param(24, marks=pytest.mark.slow)])
def test_a_request_holds_exactly_max_model_len_tokens(prompts, references, greedy, room):
    limit = len(prompts[1]) + room
    shape = Shape(12, 6, 4)
    llm = LLM("demo", tree_of("eagle3", shape), max_num_seqs=2, max_model_len=limit, device="cpu")
    outputs = llm.generate([prompts[1], prompts[1][:-1]], greedy(1000), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == references[1][:room]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert len(outputs[1].outputs[0].token_ids) == room + 1
    for output in outputs:
        num_tokens = len(output.prompt_token_ids) + 1
        for accepted, levels in zip(
            output.stats.num_accepted, output.stats.num_levels, strict=True
        ):
            assert accepted <= levels <= min(6, limit - num_tokens)
            num_tokens += accepted + 1


@pytest.mark.parametrize("draft", ["eagle3", "eagle1"])
def test_caches_equal_a_prefill_of_the_committed_tokens(greedy, prompts, draft):
    shape = Shape(12, 5, 4)
    sizes = {"max_num_seqs": 1, "max_model_len": 320, "device": "cpu"}
    after_rounds, from_scratch = (LLM("demo", tree_of(draft, shape), **sizes) for _ in range(2))
    poison_nodes(after_rounds)
    [output] = after_rounds.generate([prompts[1]], greedy(24), use_tqdm=False)
    tokens = prompts[1] + output.outputs[0].token_ids
    from_scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    for name in ("target_cache", "draft_cache"):
        rounds, prefill = (
            cache_rows(llm, name, len(tokens) - 1) for llm in (after_rounds, from_scratch)
        )
        assert torch.equal(rounds, prefill)
        assert rounds.abs().sum() > 0
    assert output.stats.mean_acceptance_length > 2


def test_what_trees_wrote_is_a_prefix(tree_llm, greedy, prompts):
    shape = Shape(12, 4, 4)
    prompt = [token for prompt in prompts for token in prompt][:120]
    llm = tree_llm("eagle3", shape)
    [first] = llm.generate([prompt], greedy(20), use_tqdm=False)
    follow_up = prompt + first.outputs[0].token_ids + [11, 12]
    [hit] = llm.generate([follow_up], greedy(12), use_tqdm=False)
    fresh = tree_llm("eagle3", shape, enable_prefix_caching=False)
    [miss] = fresh.generate([follow_up], greedy(12), use_tqdm=False)
    assert (hit.outputs[0].token_ids, hit.stats.rounds) == (
        miss.outputs[0].token_ids,
        miss.stats.rounds,
    )
    assert hit.stats.num_cached_tokens == 128


@pytest.mark.parametrize(
    "lengths",
    [(60, 62, 63, 64), pytest.param((123, 127, 128, 129), marks=pytest.mark.slow)],
)
def test_paths_cross_the_borders_of_tiles(tree_llm, prompts, greedy, lengths):
    tokens = [token for prompt in prompts[3:] for token in prompt]
    batch = [tokens[:length] for length in lengths]
    plain = LLM("demo", max_num_seqs=4, max_model_len=256, device="cpu")
    expected = plain.generate(batch, greedy(9), use_tqdm=False)
    found = tree_llm("eagle1", Shape(16, 4, 4)).generate(batch, greedy(9), use_tqdm=False)
    assert tokens_of(found) == tokens_of(expected)
    assert max(max(output.stats.num_accepted) for output in found) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("draft, temperature", [("eagle3", 0.0), ("eagle1", 0.0), ("eagle1", 0.8)])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_trees_that_are_walked_wide_change_no_text(
    monkeypatch, prompts, draft, temperature, max_num_seqs
):
    """The demo pair's contexts are too short for that, and its groups of 2 heads need 33 rows."""
    given = [token for prompt in prompts for token in prompt]
    batch = [given[:length] for length in (250, 90, 700, 247)]  # two get to key 256
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": 1024}
    sizes |= {"device": "cuda", "dtype": "bfloat16"}
    tree = tree_of(draft, Shape(33, 5, 8))
    plain, usual = (
        LLM("demo", each, **sizes).generate(batch, params, use_tqdm=False) for each in (None, tree)
    )
    monkeypatch.setattr(launch_plan, "WIDE_FROM", 256)
    prepared = []

    class Recorded(WideWalk):
        def __init__(self, given, *tensors):
            prepared.append(given.plan.is_wide)
            super().__init__(given, *tensors)

    monkeypatch.setattr(launch, "WideWalk", Recorded)
    llm = LLM("demo", tree, **sizes)
    captured = len(prepared)
    found = llm.generate(batch, params, use_tqdm=False)
    assert captured > 0
    assert set(prepared) == {True}
    assert max_num_seqs > 1 or len(prepared) == captured  # no prompt runs beside a round
    assert llm.graph_counters()["target_decode"].replays.keys() == {CUDAGraphMode.FULL}
    assert tokens_of(found) == tokens_of(plain)
    assert [each.stats.rounds for each in found] == [each.stats.rounds for each in usual]
    assert llm.run_stats(found).mean_acceptance_length > 1.3


@pytest.mark.slow
def test_preemption_changes_no_token(prompts, references, greedy):
    sizes = {"max_num_seqs": 3, "max_model_len": 192, "device": "cpu", "num_kv_blocks": 4}
    llm = LLM("demo", tree_of("eagle1", Shape(12, 4, 4)), **sizes)
    outputs = llm.generate([prompts[1], prompts[3]], greedy(130), use_tqdm=False)
    assert tokens_of(outputs) == [references[i][:130] for i in (1, 3)]
    assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize(
    "seed, device",
    [
        *(pytest.param(seed, "cpu", marks=pytest.mark.slow) for seed in range(3)),
        pytest.param(0, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_random_requests_in_random_engines_are_as_alone(seed, device):
    result = soak(60, seed, device, has_trees=True)
    assert result["faults"] == []
    assert result["preemptions"] > 0
    assert result["mixed_steps"] > 10


@pytest.mark.slow
def test_bfloat16_equals_its_own_plain_decoding(greedy, prompts):
    sizes = {"max_num_seqs": 2, "max_model_len": 128, "device": "cpu", "dtype": "bfloat16"}
    llms = LLM("demo", **sizes), LLM("demo", tree_of("eagle1", Shape(12, 4, 4)), **sizes)
    plain, tree = (llm.generate(prompts[1:3], greedy(24), use_tqdm=False) for llm in llms)
    assert tokens_of(tree) == tokens_of(plain)
    assert llms[1].run_stats(tree).mean_acceptance_length > 2


@pytest.mark.slow
def test_the_order_of_nodes_changes_nothing(greedy, prompts, references):
    llm = LLM(
        "demo", tree_of("eagle1", Shape(12, 4, 4)), max_num_seqs=1, max_model_len=192, device="cpu"
    )
    [expected] = llm.generate([prompts[1]], greedy(24), use_tqdm=False)
    draft, state = llm.engine.runner.draft, llm.engine.runner.state
    real = draft.propose

    def propose(step):
        real(step)
        for row in range(len(state.draft_tokens)):
            shuffle(state, row)

    llm.engine.runner.acts.draft.propose = propose
    [found] = llm.generate([prompts[1]], greedy(24), use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids == references[1][:24]
    assert found.stats.num_accepted == expected.stats.num_accepted
    drafted = [[each.draft_tokens for each in x.stats.rounds] for x in (found, expected)]
    assert drafted[0] != drafted[1]


def shuffle(state, row):
    """Bring the nodes of a tree into another order, in which parents still come first."""
    depth_of = torch.tensor(depths(state.draft_parents[row].tolist())[1:])
    order = torch.randperm(len(depth_of), generator=torch.Generator().manual_seed(row))
    order = order[depth_of[order].argsort(stable=True)]
    row_of = torch.zeros(len(order) + 1, dtype=torch.int64)
    row_of[order + 1] = torch.arange(1, len(order) + 1)
    state.draft_tokens[row] = state.draft_tokens[row][order]
    state.draft_parents[row] = row_of[state.draft_parents[row][order]]


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_the_kernels_of_a_gpu_make_the_same_rounds(monkeypatch, prompts, threshold):
    """In Triton's interpreter: all that trees have of their own."""

    def run():
        sizes = {"max_num_seqs": 3, "max_model_len": 256, "max_num_batched_tokens": 40}
        draft = tree_of("eagle3", Shape(9, 4, 3), threshold)
        llm = LLM("demo", draft, device="cpu", **sizes)
        base = {"max_tokens": 14, "ignore_eos": True}
        params = [SamplingParams(**base | {"seed": i} | KINDS[i]) for i in (2, 0, 3, 8, 10)]
        outputs = llm.generate(prompts[1:6], params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.stats.rounds) for output in outputs]

    expected = run()
    for module in (commit, gather_paths):
        monkeypatch.setattr(module, "pick", lambda tensor, launch, twin: launch)
    for module in (fill, prompt_rows, move_slots, process_logits, propose, row_parameters):
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    assert run() == expected


class ScriptedTrees:
    """For a request at position n, trees that hold script[n + 1 ...] plus `shift` on a path."""

    def __init__(self, runner, script, shift):
        self.runner, self.script, self.shift = runner, script, shift

    def extend(self, step):
        pass

    def propose(self, step):
        state, shape = self.runner.state, self.runner.sizes.tree
        n = int(state.num_computed_tokens[0]) + 1
        wanted = (self.script + [0] * shape.num_levels)[n : n + shape.num_levels]
        # beside each node of the path one that leads nowhere, and it comes first
        tokens, parents, last = [], [], 0
        for token in wanted:
            tokens += [(token + 7) % 4096, (token + self.shift) % 4096]
            parents += [last, last]
            last = len(tokens)
        state.draft_tokens[0] = torch.tensor(tokens)
        state.draft_parents[0] = torch.tensor(parents)
        state.num_nodes[0] = len(tokens)


@pytest.mark.parametrize("shift, num_accepted, num_tokens", [(0, 4, 31), (1, 0, 16)])
def test_perfect_trees_are_accepted_whole_and_garbage_is_not(
    greedy, prompts, references, shift, num_accepted, num_tokens
):
    shape = Shape(9, 4, 4)
    llm = LLM("demo", tree_of("eagle3", shape), max_num_seqs=1, max_model_len=256, device="cpu")
    runner = llm.engine.runner
    runner.acts.draft = ScriptedTrees(runner, prompts[1] + references[1], shift)
    [output] = llm.generate([prompts[1]], greedy(num_tokens), use_tqdm=False)
    assert output.outputs[0].token_ids == references[1][:num_tokens]
    assert set(output.stats.num_accepted) == {num_accepted}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_trees_accept_more_than_chains_of_as_many_rows(prompts, temperature):
    def acceptance_length(**shape):
        draft = {"model": "demo/eagle3", "adaptive": False, **shape}
        llm = LLM("demo", draft, max_num_seqs=24, max_model_len=512, device="cpu")
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=160, ignore_eos=True)
            for seed in range(4)
            for _ in prompts
        ]
        return llm.run_stats(llm.generate(prompts * 4, params, use_tqdm=False))

    for num_drafts, gain in ((7, 1.06), (15, 1.14)):
        tree = acceptance_length(num_speculative_tokens=8, top_k=4, num_draft_tokens=num_drafts)
        chain = acceptance_length(num_speculative_tokens=num_drafts)
        print(tree.mean_acceptance_length, chain.mean_acceptance_length)
        assert tree.mean_acceptance_length > gain * chain.mean_acceptance_length
