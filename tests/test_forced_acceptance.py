"""Drafts of random weights hold as often as is asked, and the planner foresees it."""

import copy
import json
from unittest import mock

import pytest
import torch

from scripts import bench_random, random_pair
from scripts.forced_acceptance.hold import hold_ref, launch_hold
from scripts.forced_acceptance.patches import RATES, SPREAD, forced, odds_of, rates_of
from specdec import LLM, SamplingParams
from specdec.bench import loop as loops
from specdec.bench.pair import EngineSpec, load_pair
from specdec.bench.serving import Outputs, generate, greedy
from specdec.requests.stats import SpeculationStats
from specdec.rounds.state import RequestState
from specdec.runner import Runner
from specdec.scheduling.costs import StepCosts
from specdec.sizes import DraftShape, TreeShape, chain
from specdec.start.speculation import Drafting
from specdec.step import Acts
from tests.shared_rows import rows_are_shared
from tests.specdec.buffer_tensors import step_buffers
from weights.demo import demo_prompts

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TREE = TreeShape(num_levels=3, top_k=3, num_nodes=9)
PARENTS = [0, 0, 1, 0, 1, 2, 3, 3, 5]
W = random_pair.draft_vocabulary("tiny")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a pair of random weights."""
    out = tmp_path_factory.mktemp("tiny")
    random_pair.write_pair(out, "tiny")
    return out


@pytest.fixture
def drawn():
    with mock.patch("weights.load.read_tensors", random_pair.draw):
        yield


def round_of(device, num_reqs, shape, *, shared_rows=0):
    """A round of requests whose drafts are certain to random degrees; the last slot is padding."""
    torch.manual_seed(0)
    tree = TREE if shape.is_wide else shape.levels
    buffers = step_buffers(device, num_reqs, tree, num_kv_blocks=num_reqs)
    state = RequestState(num_reqs, shape, 3, num_reqs, device, has_probs=True)
    N = shape.rows
    num_nodes_B = torch.randint(0, N, (num_reqs,), device=device) if shared_rows else N - 1
    counts_B = torch.zeros(num_reqs, dtype=torch.int64, device=device) + num_nodes_B + 1
    buffers.verify_start_loc[1:] = counts_B.cumsum(0)
    buffers.num_valid[:] = counts_B
    buffers.idx_mapping[:] = torch.randperm(num_reqs, device=device)
    buffers.idx_mapping[-1] = -1
    parents = PARENTS if shape.is_wide else list(range(N - 1))
    depths = [0]
    shares = torch.rand(num_reqs, N, device=device) / (3 if shape.is_wide else 1)
    for row, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        if parent > 0:
            shares[:, row] *= shares[:, parent]
    state.draft_probs[:-1] = shares[:, 1:]
    state.draft_parents[:] = torch.tensor(parents) if shape.is_wide else 10**6
    at_B1 = buffers.verify_start_loc[:-1, None] if shared_rows else torch.arange(num_reqs)[:, None]
    at_BN = (at_B1 if shared_rows else at_B1.to(device) * N) + torch.arange(N, device=device)
    start_B1 = torch.randint(0, 100, (num_reqs, 1), device=device)
    for b in range(num_reqs):
        rows = at_BN[b, : int(counts_B[b])]
        buffers.positions[rows] = start_B1[b] + torch.tensor(depths, device=device)[: len(rows)]
        buffers.input_ids[rows] = torch.randint(0, 1000, (len(rows),), device=device)
    buffers.target_tokens.copy_(2000 + torch.arange(len(buffers.target_tokens)))
    state.sampling.temperature[::2] = 0.8
    return buffers, state, num_reqs, shape, shared_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape, shared_rows", [(chain(4), 0), (chain(4), 999), (TREE.drafts, 0), (chain(1), 0)]
)
def test_the_kernel_holds_what_its_twin_holds(device, shape, shared_rows):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    given = round_of(torch.device(device), 25, shape, shared_rows=shared_rows)
    factors_2K = torch.rand(2, shape.levels, device=device) + 0.5
    odds_L = torch.tensor([2.0, 0.5], device=device)
    twin = copy.deepcopy(given)
    launch_hold(*given, factors_2K, odds_L)
    hold_ref(*twin, factors_2K, odds_L)
    tokens = given[0].target_tokens
    assert torch.equal(tokens, twin[0].target_tokens)
    is_held = tokens < 2000
    last = given[0].verify_start_loc[24] if shared_rows else 24 * shape.rows
    assert is_held.sum() > 10
    assert not is_held[last:].any()  # of padding, and of no request


def test_children_hold_as_their_shares_say_and_one_at_a_time():
    """The best by its odds, times F; the others by what is left."""
    shape = DraftShape(1, 3, 3)
    buffers, state, *given = round_of(CPU, 4001, shape._replace(levels=3, nodes=9))
    B = given[0]
    state.draft_parents[:] = 0
    state.draft_probs[:] = torch.tensor([0.5, 0.3, 0.1] + [0.0] * 6)
    buffers.num_valid[:] = 4
    first_B = torch.arange(B) * 10
    for row in range(4):
        buffers.positions[first_B + row] = torch.arange(B) + (row > 0)
        buffers.input_ids[first_B + row] = row
    hold_ref(buffers, state, *given, torch.ones(2, 3), torch.tensor([1.5]))
    held_B = buffers.target_tokens[first_B][:-1]
    shares = [(held_B == row).float().mean().item() for row in (1, 2, 3)]
    # 0.75 / 1.25, then 0.3 of what is left, in the proportions of the draft
    expected = [0.6, 0.3 * 0.4 * 0.6, 0.3 * 0.4 * 0.2]
    assert shares == pytest.approx(expected, abs=0.02)


def test_what_the_planner_makes_of_probabilities_changes_nothing():
    given = round_of(CPU, 400, chain(4))
    twin = copy.deepcopy(given)
    odds_L = torch.tensor([2.0, 0.5])
    hold_ref(*given, torch.ones(2, 4), odds_L)
    factors_2K = torch.tensor([[3.0, 0.2, 1.0, 7.0], [0.1, 5.0, 2.0, 1.0]])
    buffers, state = twin[:2]
    row_B = buffers.idx_mapping
    path_BK = state.draft_probs[row_B]
    share_BK = path_BK / torch.cat([torch.ones(400, 1), path_BK[:, :-1]], dim=1)
    odds_BK = share_BK / (1 - share_BK)
    odds_BK *= factors_2K[(state.sampling.temperature[row_B] > 0).long()]
    state.draft_probs[row_B] = (odds_BK / (1 + odds_BK)).cumprod(dim=1)
    hold_ref(*twin, factors_2K, odds_L)
    same = given[0].target_tokens == buffers.target_tokens
    assert same.float().mean() > 0.998  # numbers at the border of a part


@pytest.mark.parametrize("draft_vocab_size", [W, 32000])
def test_odds_give_the_rates_and_a_trained_head_s_spread(draft_vocab_size):
    rates = (0.86, 0.3)
    factors = torch.tensor(odds_of(rates, draft_vocab_size))
    logits_XW = SPREAD * torch.randn(400, draft_vocab_size)
    share_X = logits_XW.softmax(dim=-1).amax(dim=-1)
    odds_X = share_X / (1 - share_X)
    held = factors[:, None] * odds_X
    assert (held / (1 + held)).nanmean(dim=1).tolist() == pytest.approx(rates, abs=0.04)
    assert 0.68 < share_X.mean() < 0.84


# tokens a round of weights/demo_experts, by its README; of trees measured with its 48 prompts
@pytest.mark.parametrize(
    "drafting, expected",
    [
        pytest.param(Drafting(3), 3.207, marks=pytest.mark.slow),
        pytest.param(Drafting(5), 4.042, marks=pytest.mark.slow),
        pytest.param(
            Drafting(6, tree=TreeShape(num_levels=6, top_k=4, num_nodes=15)),
            4.632,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_as_many_drafts_hold_as_those_of_the_bundled_pair(tiny, drawn, drafting, expected):
    with forced(RATES["demo-experts"], W):
        pair = load_pair(str(tiny / "target"), str(tiny / "eagle3"), "cpu", "auto")
        spec = EngineSpec(drafting=drafting, max_num_seqs=48, max_model_len=192)
        jobs = greedy([prompt[:40] for prompt in pair.prompts], 96)
        requests = generate(pair.engine(spec), jobs)
        pair.drop()
    length = SpeculationStats.merged(each.stats for each in requests).mean_acceptance_length
    assert length == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("rates, drafts", [(RATES["demo-experts"], True), ((0.05,), False)])
def test_auto_drafts_what_holds_and_foresees_it(tiny, drawn, rates, drafts):
    costs = StepCosts(rounds=((64, 1.0), (512, 3.0)), plain=((64, 1.0),), level=((64, 0.1),))
    draft = {"model": str(tiny / "eagle3"), "num_speculative_tokens": "auto", "adaptive": True}
    with forced(rates, W), rows_are_shared(costs):
        llm = LLM(str(tiny / "target"), draft, device="cpu", max_num_seqs=16, max_model_len=192)
        before = llm.engine.planner.statistics
        prompts = [prompt[:30] for prompt in demo_prompts()["prompts"][:24]]
        params = SamplingParams(temperature=0, max_tokens=64 if drafts else 24, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.planner.statistics.since(before)
    levels = stats.num_levels / stats.num_rounds
    if drafts:
        assert levels > 2.5
        assert stats.measured_tokens == pytest.approx(stats.predicted_tokens, rel=0.05)
    else:
        assert levels < 2


def test_the_loop_says_that_acceptance_was_forced(capsys, monkeypatch):
    for name in ("GENERATIONS", "LEAST_REQUESTS"):
        monkeypatch.setattr(loops, name, 3)
    kept = Acts.choose, Runner._new_state, Outputs.difference, loops.loop
    options = "--suite loop -k 2 --batch 1 --max-tokens 6 --temperatures 0 --repeats 1 --device cpu"
    with pytest.raises(SystemExit, match="0"):
        bench_random.main("tiny", "--accept", "0.999", *options.split())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["suites"]["loop"]
    assert [row["acceptance"] for row in found] == ["forced: 0.999"] * 2
    assert [row["num_speculative_tokens"] for row in found] == [0, 2]
    assert found[1]["mean_acceptance_length"] > 2.8
    assert kept == (Acts.choose, Runner._new_state, Outputs.difference, loops.loop)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--accept 0.9,1 --suite loop", "--accept 0.9,1: give demo-experts, or rates between 0 an"),
        ("--accept demo --suite loop", "--accept demo: give demo-experts, or rates between 0 and "),
        ("--accept 0.9 --suite loop,exactness", "--accept: outputs are not compared, give --suite"),
        ("--accept 0.9", "--accept: outputs are not compared, give --suite loop"),
    ],
)
def test_what_cannot_be_forced_is_refused(options, message):
    with pytest.raises(SystemExit, match=message):
        bench_random.main("tiny", *options.split())


def test_rates_are_those_of_a_pair_or_given():
    assert rates_of("0.8,0.7") == (0.8, 0.7)
    assert rates_of("demo-experts") == RATES["demo-experts"]
