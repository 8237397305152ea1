"""Drafts that stop by confidence: kernel == twin; what is drafted is a prefix of all levels."""

import copy
from types import SimpleNamespace

import pytest
import torch

from specdec.config import MOST_SEQS
from specdec.kernels import jit, tl
from specdec.rounds.fill import fill_round, fill_round_ref
from specdec.rounds.level import decide, decide_ref
from specdec.rounds.propose import propose_level, write_level, write_level_ref
from specdec.rounds.rank import kept_nodes
from specdec.sizes import TreeShape, chain
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.rounds import test_round_kernels as chains
from tests.specdec.rounds import test_tree_kernels as trees
from tests.specdec.rounds.levels import level_of, propose_by_twin

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_LEN = trees.MAX_LEN
SLOTS = [4, 0, 2, 3]  # rows of the slots that are not padding
NUM_REQS = 5
PADDING = 3  # a slot


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def begin(case):
    """Both have stale numbers where nothing is written."""
    buffers = case[0]
    buffers.sample_mapping[:NUM_REQS] = buffers.idx_mapping[:NUM_REQS]
    buffers.votes.zero_()
    buffers.num_going.zero_()
    return case


def expected_levels(paths, bounds, threshold):
    """What each slot drafts, and after each level but the last how many go on.

    paths: by slot, of the best path of each level. bounds: by slot, 0: padding
    """
    levels = [1] * len(bounds)
    going = []
    for level in range(len(paths[0]) - 1):
        if threshold < 0:
            on = list(range(len(bounds)))
        else:
            on = [b for b, most in enumerate(bounds) if most > level + 1]
            mean = sum(paths[b][level] for b in on) / max(len(on), 1)
            on = on if mean >= threshold and 0 not in going else []
        going.append(len(on))
        for b in on:
            levels[b] = level + 2
    return levels, going


def near_mean(paths, bounds, level, share):
    """A threshold from the least (-1) over the mean (0) to the greatest (1) of the votes."""
    votes = [paths[b][level] for b, most in enumerate(bounds) if most > level + 1]
    mean = sum(votes) / len(votes)
    end = max(votes) if share > 0 else min(votes)
    assert len(votes) > 1
    assert abs(end - mean) > 0.003
    return mean + abs(share) * (end - mean)


class ChainCase:
    K = 4

    def __init__(self, device, threshold, is_adaptive):
        torch.manual_seed(0)
        buffers, state = chains.make(device, self.K, keeps_probs=True)
        self.start = begin((buffers, state))
        self.start[1].num_draft_tokens[:] = self.K
        self.start[1].num_draft_tokens[4] = 2  # slot 0 may have two levels
        self.start[0].proposed_tokens.zero_()
        self.bounds = [2, self.K, self.K, 0, self.K]
        self.threshold = None if threshold is None else torch.tensor([threshold], device=device)
        self.calibration = torch.ones(2, self.K, device=device)
        self.levels = [0, *[None] * (self.K - 1)] if is_adaptive else range(self.K)
        sharpness = torch.tensor([3.0, 0.5, 0.35, 1.0, 0.2], device=device)[:, None]
        normed = torch.randn(self.K, NUM_REQS, chains.D, device=device)
        self.normed = normed * sharpness
        self.weight = torch.randn(chains.V, chains.D, device=device)

    @property
    def paths(self):
        shares = (self.normed @ self.weight.t()).softmax(dim=-1).amax(dim=-1)
        return shares.cumprod(dim=0).t().tolist()

    def draft(self, propose):
        """All levels, as a replay launches them."""
        buffers, state = case = copy.deepcopy(self.start)
        going = []
        for normed, level in zip(self.normed, self.levels, strict=True):
            how = {"calibration": self.calibration, "threshold": self.threshold}
            propose(normed, self.weight, level_of(buffers, state, level, MAX_LEN, **how))
            going.append(int(buffers.num_going))
            assert buffers.votes == 0
        return case, going


def around_means(levels):
    """Thresholds, by level, between the mean of the votes and the greatest or the least."""
    return [(level, share) for level in levels for share in (0.3, -0.3)]


@pytest.mark.parametrize(
    "threshold, is_adaptive",
    [
        *((each, is_adaptive) for each in around_means([0, 1]) for is_adaptive in (False, True)),
        (-1.0, True),
        *(
            pytest.param(threshold, is_adaptive, marks=pytest.mark.slow)
            for threshold in (0.999, 0.3, 0.05, 0.0001, *around_means([2]))
            for is_adaptive in (False, True)
        ),
    ],
    ids=str,
)
def test_chains_stop_where_their_mean_probability_falls_below(device, threshold, is_adaptive):
    case = ChainCase(device, None, is_adaptive)
    if isinstance(threshold, tuple):
        threshold = near_mean(case.paths, case.bounds, *threshold)
    case = ChainCase(device, threshold, is_adaptive)
    (buffers, state), going = case.draft(by_kernel(propose_level))
    twin, twin_going = case.draft(propose_by_twin)
    chains.same((buffers, state), twin, NUM_REQS, case.K)
    assert going == twin_going
    expected, expected_going = expected_levels(case.paths, case.bounds, threshold)
    assert going[:-1] == expected_going
    real = [b for b in range(NUM_REQS) if b != PADDING]
    drafted = [expected[b] for b in real]
    assert buffers.draft_levels[real].tolist() == drafted
    # the context has no room for drafts of row 4, and for one of row 3
    live = [min(count, {4: 0, 3: 1}.get(row, 9)) for row, count in zip(SLOTS, drafted, strict=True)]
    assert state.num_nodes[SLOTS].tolist() == twin[1].num_nodes[SLOTS].tolist() == live
    whole = ChainCase(device, None, is_adaptive)
    (_, all_state), _ = whole.draft(propose_by_twin)
    for b, row in enumerate([4, 0, 2, -1, 3]):
        if row >= 0:
            drafts = state.draft_tokens[row, : expected[b]]
            assert torch.equal(drafts, all_state.draft_tokens[row, : expected[b]])


@pytest.mark.parametrize("propose", [by_kernel(propose_level), propose_by_twin])
@pytest.mark.parametrize("b", [0, 1, 4])
def test_one_request_stops_by_its_own_path(device, propose, b):
    """Beside padding; also where its probability is the threshold."""
    case = ChainCase(device, None, is_adaptive=True)
    own = case.paths[b]
    row = int(case.start[0].sample_mapping[b])
    case.start[0].sample_mapping[:NUM_REQS] = -1
    case.start[0].sample_mapping[b] = row
    probs = case.draft(propose)[0][1].draft_probs[row].tolist()
    for threshold in (*probs[:3], *(p + 1e-3 for p in probs[:3]), *(p - 1e-3 for p in probs[:3])):
        case.threshold = torch.tensor([threshold], device=device)
        (buffers, _), _ = case.draft(propose)
        stop = next((i for i, p in enumerate(probs) if p < threshold), case.K - 1)
        assert buffers.draft_levels[b] == 1 + min(stop, case.bounds[b] - 1)
    assert probs == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize("propose", [by_kernel(propose_level), propose_by_twin])
@pytest.mark.parametrize("level", [None, 1])
def test_where_none_goes_on_old_levels_write_nothing(device, propose, level):
    """Nor in slots that may have more."""
    case = ChainCase(device, 0.3, is_adaptive=level is None)
    buffers, state = case.start
    buffers.draft_levels.fill_(1)
    case.levels, case.normed = [level], torch.full_like(case.normed[:1], torch.nan)
    ours, going = case.draft(propose)
    chains.same(ours, case.start, NUM_REQS, case.K)
    assert torch.equal(ours[1].num_nodes, state.num_nodes)
    assert going == [0]


@jit
def _vote_kernel(
    num_going_ptr, votes_ptr, bounds_ptr, threshold_ptr, probs_ptr, order_ptr, idx_ptr, level, B
):
    b = tl.load(order_ptr + tl.program_id(0))
    idx = tl.load(idx_ptr + b)
    row = tl.where(idx < 0, B, idx)
    pointers = (num_going_ptr, votes_ptr, bounds_ptr, threshold_ptr)
    decide(pointers, B, tl.load(probs_ptr + b), level, idx, row)


def vote(probs, bounds, threshold, order, level=1, num_voted=0):
    """Returns num_going after all votes. A bound of 0 is padding, which shares the last row.

    num_voted: slots, equal to the last one, whose votes are there without a program for each
    """
    device = probs.device
    num_going, votes = torch.full((2, 1), -5, device=device).unbind()
    votes.zero_()
    count = len(probs)
    idx = torch.arange(count, device=device).where(bounds > 0, -1)
    rows = torch.cat([bounds, bounds.new_full((1,), 10**6)])
    at = torch.tensor([threshold], device=device)
    one = torch.zeros_like(votes)
    _vote_kernel[(1,)](num_going, one, rows, at, probs, order[-1:], idx, level, 1 << 13)
    for _ in range(2):  # votes are as they were
        votes.copy_(one * num_voted)
        last = count - num_voted
        _vote_kernel[(last,)](num_going, votes, rows, at, probs, order[:last], idx, level, count)
        assert votes == 0
    buffers = SimpleNamespace(sample_mapping=idx, num_going=torch.full_like(num_going, -5))
    state = SimpleNamespace(num_draft_tokens=rows)
    levels = torch.full_like(idx, level)
    to = SimpleNamespace(buffers=buffers, state=state, threshold=at)
    decide_ref(to, probs, levels, torch.ones_like(idx, dtype=torch.bool))
    assert buffers.num_going == num_going
    return int(num_going)


def test_votes_do_not_depend_on_their_order(device):
    """At a threshold which float sums miss in one order or another."""
    probs = torch.tensor([0.1, 0.7, 0.3, 1e-7, 0.9, 0.2, torch.nan, 5.0], device=device)
    bounds = torch.tensor([3, 4, 3, 9, 2, 0, 0, 0], device=device)
    units = [int(p * 2**24) for p in probs[:4].tolist()]
    threshold = sum(units) // 4 / 2**24  # at most the mean
    for seed in range(6):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).to(device)
        assert vote(probs, bounds, threshold, order) == 4
        assert vote(probs, bounds, threshold + 2**-22, order) == 0
        assert vote(probs, bounds * (bounds < 3), 0.0, order) == 0  # none has room
        assert vote(probs, bounds, -1.0, order) == 8


@pytest.mark.parametrize("prob, counts", [(torch.nan, 0.0), (-1.0, 0.0), (torch.inf, 1.0)])
def test_what_is_no_probability_decides_for_no_other(device, prob, counts):
    probs = torch.tensor([0.8, prob], device=device)
    bounds, order = torch.tensor([[3, 3], [1, 0]], device=device)
    mean = (0.8 + counts) / 2
    assert vote(probs, bounds, mean - 0.01, order) == 2
    assert vote(probs, bounds, mean + 0.01, order) == 0


@pytest.mark.parametrize("prob, threshold", [(0.5, 0.5), (1.0, 0.0), (0.0, 2.0), (0.0, -1.0)])
@pytest.mark.parametrize("num_voted", [MOST_SEQS - 9, pytest.param(0, marks=pytest.mark.slow)])
def test_the_votes_of_the_largest_batch_fit(device, prob, threshold, num_voted):
    count = MOST_SEQS
    probs = torch.full((count,), prob, device=device)
    bounds = torch.full((count,), 9, device=device)
    order = torch.arange(count, device=device)
    found = vote(probs, bounds, threshold, order, num_voted=num_voted)
    assert found == count * (prob >= threshold)


def test_drafts_that_were_not_made_are_padding(device):
    buffers, state = chains.make(device, 4)
    state.num_nodes[:] = torch.tensor([1, 2, 3, 1, 0, 0, 9], device=device)
    ours, theirs = (buffers, state), copy.deepcopy((buffers, state))
    by_kernel(fill_round)(*ours, NUM_REQS, chain(4), 0, MAX_LEN)
    fill_round_ref(*theirs, NUM_REQS, chain(4), 0, MAX_LEN)
    chains.same(ours, theirs, NUM_REQS, 4)
    assert buffers.num_valid[:5].tolist() == [1, 2, 4, 0, 2]
    assert (buffers.slot_mapping[5:10] >= 0).tolist() == [True] * 2 + [False] * 3


SHAPES = [
    TreeShape(num_levels=4, top_k=3, num_nodes=20),
    TreeShape(num_levels=3, top_k=2, num_nodes=3),
    TreeShape(num_levels=1, top_k=5, num_nodes=2),
]


class TreeCase:
    def __init__(self, device, shape, threshold):
        torch.manual_seed(0)
        self.shape = shape
        self.start = begin(trees.make(device, shape))
        self.start[1].num_draft_tokens[3] = 2
        bounds = self.start[1].num_draft_tokens.tolist()
        self.bounds = [0 if row < 0 else bounds[row] for row in [4, 0, 2, -1, 3]]
        self.threshold = None if threshold is None else torch.tensor([threshold], device=device)
        sharpness = torch.tensor([4.0, 1.5, 1.0, 3.0, 6.0], device=device)
        self.logits = [
            sharpness.repeat_interleave(rows)[:, None]
            * torch.randn(NUM_REQS * rows, 40, device=device)
            for rows in [1, *[shape.top_k] * (shape.num_levels - 1)]
        ]

    def draft(self, write):
        buffers, state = case = copy.deepcopy(self.start)
        going = []
        for level, logits in enumerate(self.logits):
            to = level_of(buffers, state, level, MAX_LEN, threshold=self.threshold)
            # A level looks up the level before it ahead of its wait, so a kernel that has waited
            # must lie between them: the head's, or this copy.
            write(logits.clone(), to, None)
            going.append(int(buffers.num_going))
            assert buffers.votes == 0
        return case, going


@pytest.mark.parametrize(
    "shape, threshold",
    [
        *((SHAPES[0], each) for each in around_means([0, 1])),
        (SHAPES[1], (0, 0.3)),
        (SHAPES[2], 0.3),
        *(
            pytest.param(shape, threshold, marks=pytest.mark.slow)
            for shape in SHAPES
            for threshold in (0.8, 0.3, 0.1, -1.0)
        ),
    ],
    ids=str,
)
def test_a_tree_keeps_the_nodes_of_the_levels_that_it_has(device, shape, threshold):
    k, D = shape.top_k, shape.num_levels
    firsts = [0, *(k + k * k * level for level in range(D))]  # of levels, and the end
    case = TreeCase(device, shape, None)
    (whole, _), _ = case.draft(write_level_ref)
    best = [
        whole.candidates.scores[:NUM_REQS, firsts[j] : firsts[j + 1]].amax(dim=1) for j in range(D)
    ]
    paths = torch.stack(best, dim=1).exp().tolist()
    if isinstance(threshold, tuple):
        threshold = near_mean(paths, case.bounds, *threshold)
    case = TreeCase(device, shape, threshold)
    (buffers, state), going = case.draft(by_kernel(write_level))
    twin, twin_going = case.draft(write_level_ref)
    trees.assert_same((buffers, state), twin)
    assert torch.equal(state.num_nodes[SLOTS], twin[1].num_nodes[SLOTS])
    levels_of, expected_going = expected_levels(paths, case.bounds, threshold)
    assert going[:-1] == twin_going[:-1] == expected_going
    for b, row in enumerate([4, 0, 2, -1, 3]):
        if row < 0:
            continue
        levels = levels_of[b]
        assert buffers.draft_levels[b] == levels
        room = {4: 0, 3: 1}.get(row, D)  # in the context
        levels = min(levels, case.bounds[b], room)
        count = min(firsts[levels], shape.num_nodes)
        assert state.num_nodes[row] == count
        cut = whole.candidates.scores[b].clone()
        cut[firsts[levels] :] = -torch.inf
        place, parents = kept_nodes(cut[None], whole.candidates.places[b][None], shape.num_nodes)
        kept = whole.candidates.tokens[b][place], parents
        found = state.draft_tokens[row], state.draft_parents[row]
        for ours, theirs in zip(found, kept, strict=True):
            assert torch.equal(ours[:count], theirs[0, :count])
        dead = [x[count:].tolist() for x in found]
        num_dead = shape.num_nodes - count
        assert dead == [[0] * num_dead] * 2


def test_nodes_that_were_not_drafted_are_padding(device):
    shape = SHAPES[0]
    ours = trees.make(device, shape)
    ours[1].num_nodes[:] = torch.tensor([3, 20, 12, 20, 0, 0, 20], device=device)
    theirs = copy.deepcopy(ours)
    N = shape.num_nodes + 1
    by_kernel(fill_round)(*ours, NUM_REQS, shape.drafts, 0, MAX_LEN)
    fill_round_ref(*theirs, NUM_REQS, shape.drafts, 0, MAX_LEN)
    trees.assert_same(ours, theirs)
    is_row = ours[0].slot_mapping[: NUM_REQS * N].view(NUM_REQS, N) >= 0
    assert is_row[1].tolist() == [True] * 4 + [False] * (N - 4)
    assert is_row[2].tolist() == [True] * 13 + [False] * (N - 13)
    assert ours[0].num_valid[:4].tolist() == [1, 4, 13, 0]
