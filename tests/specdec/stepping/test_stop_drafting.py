"""Drafts that stop by confidence: kernel == twin; what is drafted is a prefix of all levels."""

import copy
import math

import pytest
import torch

from specdec.proposal.tree import kept_nodes
from specdec.sizes import TreeShape
from specdec.stepping.fill import fill_round_ref, launch_fill_round
from specdec.stepping.fill_tree import fill_tree_ref, launch_fill_tree
from specdec.stepping.grow_tree import (
    TreeLevel,
    add_children_ref,
    keep_nodes_ref,
    launch_add_children,
    launch_keep_nodes,
)
from specdec.stepping.propose import DraftLevel, launch_propose, propose_ref
from tests.specdec.stepping import test_round_kernels as chains
from tests.specdec.stepping import test_tree_kernels as trees

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_LEN = trees.MAX_LEN
SLOTS = [4, 0, 2, 3]  # rows of the slots that are not padding
NUM_REQS = 5
PADDING = 3  # a slot
THRESHOLDS = [0.999, 0.3, 0.05, 0.0001, -1.0]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def begin(case):
    """Both have stale numbers where nothing is written."""
    buffers, state = case
    buffers.sample_mapping[:NUM_REQS] = buffers.idx_mapping[:NUM_REQS]
    buffers.num_going.zero_()
    state.may_stop = True
    return case


def num_levels(buffers, most):
    """Of each slot, once all levels have been launched."""
    return buffers.draft_levels[:NUM_REQS].clamp(max=most).tolist()


class ChainCase:
    K = 4

    def __init__(self, device, threshold, is_adaptive):
        torch.manual_seed(0)
        buffers, state = chains.make(device, self.K, keeps_probs=True)
        self.start = begin((buffers, state))
        self.start[1].num_draft_tokens[:] = self.K
        self.start[1].num_draft_tokens[4] = 2  # slot 0 may have two levels
        self.start[0].draft_tokens.zero_()
        self.threshold = None if threshold is None else torch.tensor([threshold], device=device)
        self.calibration = torch.tensor([0.0, 1.0], device=device).repeat(2, self.K, 1)
        self.levels = [0, *[None] * (self.K - 1)] if is_adaptive else range(self.K)
        sharpness = torch.tensor([3.0, 0.5, 0.35, 1.0, 0.2], device=device)[:, None]
        normed = torch.randn(self.K, NUM_REQS, chains.D, device=device)
        self.normed = normed * sharpness
        self.weight = torch.randn(chains.V, chains.D, device=device)

    def draft(self, propose):
        """All levels, as a replay launches them."""
        buffers, state = case = copy.deepcopy(self.start)
        going = []
        for normed, level in zip(self.normed, self.levels, strict=True):
            to = DraftLevel(
                buffers=buffers,
                state=state,
                level=level,
                d2t_W=None,
                max_model_len=MAX_LEN,
                calibration=self.calibration,
                threshold=self.threshold,
            )
            propose(normed, self.weight, to)
            going.append(int(buffers.num_going))
        return case, going


@pytest.mark.parametrize(
    "threshold, is_adaptive",
    [
        *((0.05, is_adaptive) for is_adaptive in (False, True)),
        (-1.0, True),
        *(
            pytest.param(threshold, is_adaptive, marks=pytest.mark.slow)
            for threshold in (0.999, 0.3, 0.0001)
            for is_adaptive in (False, True)
        ),
    ],
)
def test_a_chain_stops_where_its_probability_falls_below(device, threshold, is_adaptive):
    case = ChainCase(device, threshold, is_adaptive)
    (buffers, state), going = case.draft(launch_propose)
    twin, expected_going = case.draft(propose_ref)
    chains.same((buffers, state), twin, NUM_REQS, case.K)
    assert going == expected_going
    shares = (case.normed @ case.weight.t()).softmax(dim=-1).amax(dim=-1).cpu()
    expected = []
    for b, row in enumerate([4, 0, 2, -1, 3]):
        paths = shares[:, b].cumprod(dim=0)
        most = 2 if row == 4 else case.K
        reached = [bool(p >= threshold) for p in paths[: most - 1]]
        stop = 1 + next((i for i, goes_on in enumerate(reached) if not goes_on), most - 1)
        expected.append(case.K if threshold < 0 else 1 if row < 0 else stop)
    assert num_levels(buffers, case.K) == expected
    assert state.num_live_drafts[SLOTS].tolist() == [
        count for b, count in enumerate(expected) if b != PADDING
    ]
    counted = [count for b, count in enumerate(expected) if threshold < 0 or b != PADDING]
    on = [sum(count > level for count in counted) for level in range(1, case.K)]
    assert going[:-1] == on
    whole = ChainCase(device, None, is_adaptive)
    (_, all_state), _ = whole.draft(propose_ref)
    for b, row in enumerate([4, 0, 2, -1, 3]):
        if row >= 0:
            drafts = state.draft_tokens[row, : expected[b]]
            assert torch.equal(drafts, all_state.draft_tokens[row, : expected[b]])


@pytest.mark.parametrize("propose", [launch_propose, propose_ref])
@pytest.mark.parametrize("level", [None, 1])
def test_where_none_goes_on_old_levels_write_nothing(device, propose, level):
    """A batch may be padded with slots that drafted more in an earlier step."""
    case = ChainCase(device, 0.3, is_adaptive=level is None)
    buffers, state = case.start
    buffers.draft_levels[:] = 99
    state.num_live_drafts.zero_()
    case.levels, case.normed = [level], torch.full_like(case.normed[:1], torch.nan)
    ours, _ = case.draft(propose)
    chains.same(ours, case.start, NUM_REQS, case.K)
    assert torch.equal(ours[0].draft_levels, buffers.draft_levels)


def test_thresholds_stop_slots_at_different_levels(device):
    found = set()
    for threshold in THRESHOLDS[1:-1]:
        case = ChainCase(device, threshold, is_adaptive=False)
        found |= set(num_levels(case.draft(propose_ref)[0][0], case.K))
    assert found == {1, 2, 3, 4}


@pytest.mark.parametrize("own", [2, 4])
def test_drafts_that_were_not_made_are_padding(device, own):
    buffers, state = chains.make(device, 4)
    state.may_stop = True
    state.num_live_drafts[:] = torch.tensor([1, 2, 3, 4, 3, 0, 9], device=device)
    state.num_draft_tokens[:5] = own
    ours, theirs = (buffers, state), copy.deepcopy((buffers, state))
    launch_fill_round(*ours, NUM_REQS, MAX_LEN, 5)
    fill_round_ref(*theirs, NUM_REQS, MAX_LEN, 5)
    chains.same(ours, theirs, NUM_REQS, 4)
    live = [min(own, count) for count in (3, 1, 3)]
    assert buffers.num_valid[:3].tolist() == [1, *(count + 1 for count in live[1:])]
    assert (buffers.slot_mapping[5:10] >= 0).sum() == live[1] + 1


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
        self.threshold = None if threshold is None else torch.tensor([threshold], device=device)
        sharpness = torch.tensor([4.0, 1.5, 1.0, 3.0, 6.0], device=device)
        self.logits = [
            sharpness.repeat_interleave(rows)[:, None]
            * torch.randn(NUM_REQS * rows, 40, device=device)
            for rows in [1, *[shape.top_k] * (shape.num_levels - 1)]
        ]

    def draft(self, add_children, keep_nodes):
        buffers, state = case = copy.deepcopy(self.start)
        for level, logits in enumerate(self.logits):
            to = TreeLevel(
                buffers=buffers,
                state=state,
                level=level,
                num_levels=self.shape.num_levels,
                d2t_W=None,
                max_model_len=MAX_LEN,
                threshold=self.threshold,
            )
            # A level looks up the level before it ahead of its wait, so a kernel that has waited
            # must lie between them: the head's, or this copy.
            add_children(logits.clone(), NUM_REQS, to, None)
        keep_nodes(NUM_REQS, to)
        return case


@pytest.mark.parametrize(
    "shape, threshold",
    [
        (SHAPES[0], 0.3),
        (SHAPES[1], 0.1),
        (SHAPES[2], 0.3),
        *(
            pytest.param(shape, threshold, marks=pytest.mark.slow)
            for shape in SHAPES
            for threshold in (0.8, 0.1, -1.0)
        ),
    ],
    ids=str,
)
def test_a_tree_keeps_the_nodes_of_the_levels_that_it_has(device, shape, threshold):
    case = TreeCase(device, shape, threshold)
    buffers, state = case.draft(launch_add_children, launch_keep_nodes)
    twin = case.draft(add_children_ref, keep_nodes_ref)
    trees.assert_same((buffers, state), twin)
    assert torch.equal(state.num_live_drafts[SLOTS], twin[1].num_live_drafts[SLOTS])
    whole, _ = TreeCase(device, shape, None).draft(add_children_ref, keep_nodes_ref)
    k, D = shape.top_k, shape.num_levels
    firsts = [0, *(k + k * k * level for level in range(D))]  # of levels, and the end
    for b, row in enumerate([4, 0, 2, -1, 3]):
        if row < 0:
            continue
        scores = whole.tree.scores[b]
        paths = [math.exp(scores[firsts[j] : firsts[j + 1]].amax()) for j in range(D)]
        own = min(int(state.num_draft_tokens[row]), D)
        reached = (j for j in range(D) if j + 1 >= own or paths[j] < threshold)
        levels = D if threshold < 0 else next(reached, D - 1) + 1
        assert num_levels(buffers, D)[b] == levels
        count = min(firsts[levels], shape.num_nodes)
        assert state.num_live_drafts[row] == count
        cut = scores.clone()
        cut[firsts[levels] :] = -torch.inf
        tree = (whole.tree.tokens[b], cut, whole.tree.places[b])
        kept = kept_nodes(*(x[None] for x in tree), shape)
        found = state.draft_nodes[row], state.draft_parents[row], state.draft_depths[row]
        for ours, theirs in zip(found, kept[:3], strict=True):
            assert torch.equal(ours[:count], theirs[0, :count])
        dead = [x[count:].tolist() for x in found]
        num_dead = shape.num_nodes - count
        assert dead == [[0] * num_dead, [0] * num_dead, [1] * num_dead]


def test_slots_of_a_tree_stop_at_different_levels(device):
    found = set()
    for threshold in (0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05):
        case = TreeCase(device, SHAPES[0], threshold).draft(add_children_ref, keep_nodes_ref)
        found |= set(num_levels(case[0], 4))
    assert found == {1, 2, 3, 4}


def test_nodes_that_were_not_drafted_are_padding(device):
    shape = SHAPES[0]
    ours = trees.make(device, shape)
    ours[1].may_stop = True
    ours[1].num_live_drafts[:] = torch.tensor([3, 20, 12, 20, 3, 0, 20], device=device)
    ours[1].num_draft_tokens[:5] = 4
    theirs = copy.deepcopy(ours)
    N = shape.num_nodes + 1
    launch_fill_tree(*ours, NUM_REQS, N, MAX_LEN)
    fill_tree_ref(*theirs, NUM_REQS, N, MAX_LEN)
    trees.assert_same(ours, theirs)
    is_row = ours[0].slot_mapping[: NUM_REQS * N].view(NUM_REQS, N) >= 0
    assert is_row[1].tolist() == [True] * 4 + [False] * (N - 4)
    assert is_row[2].tolist() == [True] * 13 + [False] * (N - 13)
    assert ours[0].num_valid[:4].tolist() == [1, 4, 13, 0]
