"""kernel == twin for the levels of drafts: integers to the bit, scores but for the last digits."""

import copy

import pytest
import torch

from specdec.drafts.perturbation import perturbation
from specdec.kernels.best_children import Perturbation
from specdec.kernels.choose_token import NoiseKeys
from specdec.kernels.gumbel import TARGET
from specdec.requests.draft_tree import depths
from specdec.rounds.children import launch_children
from specdec.rounds.fill import fill_round_ref
from specdec.rounds.propose import (
    propose_level,
    propose_levels,
    write_level,
    write_level_ref,
)
from specdec.rounds.rank import keep_nodes_ref, launch_keep_nodes
from specdec.sampler import row_parameters
from specdec.sizes import TreeShape, chain
from tests.specdec.kernels.by_kernel import by_kernel
from tests.specdec.rounds import levels
from tests.specdec.rounds.levels import propose_by_twin
from tests.specdec.rounds.test_round_kernels import MAX_LEN, D, V, make, same, shared_case
from tests.specdec.rounds.test_tree_kernels import NUM_REQS, SHAPES, assert_same
from tests.specdec.rounds.test_tree_kernels import make as make_wide

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return torch.device(request.param)


def level_of(buffers, state, level, num_levels=None, **more):
    return levels.level_of(buffers, state, level, MAX_LEN, num_levels, **more)


@pytest.mark.parametrize("by", [by_kernel(propose_level), propose_level])
def test_logits_may_have_a_factor(device, by):
    normed, weight = torch.randn(5, D, device=device), torch.randn(V, D, device=device)
    found = []
    for x, factor in ((normed, 0.5), (normed / 2, 1.0), (normed, 1.0)):
        buffers, state = make(device, 3, keeps_probs=True)
        calibration = torch.ones(2, 3, device=device)
        fill_round_ref(buffers, state, 5, chain(3), 0, MAX_LEN)
        to = level_of(buffers, state, 0, calibration=calibration)
        by(x, weight, to, None, factor)
        found.append((state.draft_tokens[:5, 0].clone(), state.draft_probs[:5, 0].clone()))
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize(
    "at_once, alone",
    [(by_kernel(propose_levels), by_kernel(propose_level)), (propose_levels, propose_level)],
)
def test_levels_that_depend_on_no_other_are_those_of_one_after_another(device, at_once, alone):
    normed, weight = torch.randn(3, 5, D, device=device) / 4, torch.randn(V, D, device=device)
    how = {"calibration": torch.ones(2, 3, device=device)}
    blocks, levels_alone = (make(device, 3, keeps_probs=True) for _ in range(2))
    for buffers, state in (blocks, levels_alone):
        fill_round_ref(buffers, state, 5, chain(3), 0, MAX_LEN)
    at_once(normed, weight, [level_of(*blocks, level, **how) for level in range(3)])
    for level in range(3):
        alone(normed[level].clone(), weight, level_of(*levels_alone, level, **how))
    rows = [0, 2, 3, 4]  # that have batch slots
    for name in ("draft_tokens", "draft_probs", "num_nodes"):
        found, expected = (getattr(state, name)[rows] for _, state in (blocks, levels_alone))
        assert torch.equal(found, expected), name
    assert len(blocks[1].draft_tokens[rows].unique()) > 6
    assert blocks[1].draft_probs[rows].unique().numel() == 12


@pytest.mark.parametrize("K, level", [(1, 0), (3, 0), (3, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("has_d2t", [False, True])
@pytest.mark.parametrize("is_counted", [False, True])
def test_a_node_goes_to_the_state_and_to_the_row_after_it(device, K, level, has_d2t, is_counted):
    ours = make(device, K)
    fill_round_ref(*ours, 5, chain(K), 0, MAX_LEN)
    ours[0].proposed_tokens[:5] = torch.randint(0, 50, (5, K), device=device)
    last = level  # of padding
    if is_counted and level > 0:
        ours[0].draft_levels[:5] = level
        ours[0].draft_levels[3] = K + 1  # what others have left
        last = K - 1
    theirs = copy.deepcopy(ours)
    normed, weight = torch.randn(5, D, device=device), torch.randn(V, D, device=device)
    d2t = torch.randperm(1000, device=device)[:V] if has_d2t else None
    given = None if is_counted and level > 0 else level
    by_kernel(propose_level)(normed, weight, level_of(*ours, given, d2t_W=d2t))
    propose_by_twin(normed, weight, level_of(*theirs, given, d2t_W=d2t))
    same(ours, theirs, 5, K)
    buffers, state = ours
    best = (normed @ weight.t()).argmax(dim=1)
    tokens = best if d2t is None else d2t[best]
    levels_B = torch.tensor([level, level, level, last, level], device=device)
    assert buffers.proposed_tokens[range(5), levels_B].tolist() == tokens.tolist()
    assert torch.equal(buffers.draft_levels[:5], levels_B + 1)
    # rows 2, 3 and 4 have no drafts, one place in the context, and none
    for each in (state, theirs[1]):
        assert each.num_nodes[[0, 2, 3, 4]].tolist() == [level + 1, 0, 1, 0]
    for b, row in ((0, 4), (1, 0), (2, 2), (4, 3)):
        position = int(state.num_computed_tokens[row]) + level
        is_inside = position < MAX_LEN
        assert state.draft_tokens[row, level] == tokens[b]
        assert buffers.draft_positions[b] == (position if is_inside else 0)
        assert (buffers.draft_slots[b] >= 0) == is_inside


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("level, is_sure", [(0, None), (None, None), (0, 0.3)])
def test_a_node_has_the_probability_of_its_path(device, level, is_sure, is_sampled):
    """is_sure: what the draft says beside its logits, of the first request."""
    K = 3
    *ours, num_rows = shared_case(device, K)
    fill_round_ref(*ours, 5, chain(K), num_rows, MAX_LEN)
    ours[0].proposed_tokens[:5] = 0
    ours[0].draft_levels[:5] = 1
    ours[1].draft_probs[:, 0] = 0.5
    theirs = copy.deepcopy(ours)
    normed, weight = torch.randn(5, D, device=device), torch.randn(V, D, device=device)
    normed[:3] *= torch.tensor([0.01, 0.3, 1.0], device=device)[:, None]
    calibration = torch.tensor([[0.7] * K, [1.4] * K], device=device)
    keys = NoiseKeys(
        temperatures=torch.tensor([0.0, 0.7, 1.3, 0.0, 1.0], device=device),
        seeds=torch.arange(10, device=device).view(5, 2),
        positions=torch.arange(5, device=device) + 9,
        epochs=torch.zeros(5, dtype=torch.int64, device=device),
        stream=TARGET,
    )
    noise = Perturbation(torch.full((5,), -torch.inf, device=device), keys)
    draw = (lambda _: noise) if is_sampled else None
    given = {"calibration": calibration}
    if is_sure is not None:
        given["confidence_B"] = torch.tensor([is_sure, 0.9, torch.nan, 0.5, 1.0], device=device)
    for write, case in ((by_kernel(propose_level), ours), (propose_by_twin, theirs)):
        write(normed, weight, level_of(*case, level, **given), draw)
    same(ours, theirs, 5, K)
    for name, rtol in (("draft_probs", 2e-3), ("num_nodes", 0)):
        found, expected = (getattr(each[1], name)[[4, 0, 2, 3]] for each in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5, msg=name)
    at = 0 if level == 0 else 1
    state = ours[1]
    assert state.num_nodes[[4, 0, 2, 3]].tolist() == [0, at + 1, at + 1, 1]
    confidence = (normed[0] @ weight.t()).double().softmax(dim=0).amax()  # of a greedy request
    if is_sure is not None:
        confidence = (confidence * is_sure).sqrt()
        assert state.draft_probs[2, at] < 1e-3  # NaN counts as 0
    confidence = confidence.clamp(1e-4, 1 - 1e-4)
    odds = 0.7 * confidence / (1 - confidence)
    conditional = odds / (1 + odds)
    torch.testing.assert_close(
        state.draft_probs[4, at].double(),
        conditional * (1 if at == 0 else 0.5),
        rtol=1e-3,
        atol=1e-5,
    )


def mapped(device, shape):
    """A case of test_tree_kernels, after its `fill`."""
    buffers, state = make_wide(device, shape)
    buffers.sample_mapping[:NUM_REQS] = buffers.idx_mapping[:NUM_REQS]
    buffers.votes.zero_()
    state.num_nodes.fill_(777)
    return buffers, state


def assert_kept(ours, theirs, shape, num_levels):
    """Kernel and twin keep the same nodes: of real requests, of depths that they may have."""
    assert_same(ours, theirs)
    state, k, X = ours[1], shape.top_k, shape.num_nodes
    M = k + k * k * (num_levels - 1)
    # rows 1 and 4 are at the end of the context, row 3 next to it; row 2 has one draft of its own
    num_live = [min(each, X) for each in (M, 0, k, k, 0)]
    for each in (ours, theirs):
        assert each[1].num_nodes[:5].tolist() == num_live
    row_X = torch.arange(1, X + 1, device=state.draft_parents.device)
    assert (state.draft_parents[:5] < row_X).all()
    for row, count in enumerate(num_live):
        deepest = 1 if row in (2, 3) else num_levels
        assert max(depths(state.draft_parents[row, :count].tolist())) <= deepest
        nodes = state.draft_tokens, state.draft_parents, state.draft_probs
        assert not any(each[row, count:].any() for each in nodes)


WIDE = [
    (SHAPES[0], 70, True, True),
    (SHAPES[1], 33, False, False),
    (SHAPES[2], 33, False, False),
    (SHAPES[3], 70, True, False),
]


@pytest.mark.parametrize(
    "shape, vocab, has_d2t, is_sampled",
    [
        *WIDE,
        pytest.param(SHAPES[2], 33, False, True, marks=pytest.mark.slow),
        *(
            pytest.param(shape, 2100, has_d2t, not has_d2t, marks=pytest.mark.slow)
            for shape in SHAPES
            for has_d2t in (True, False)
        ),
    ],
    ids=str,
)
def test_levels_wider_than_one(device, shape, vocab, has_d2t, is_sampled):
    ours = mapped(device, shape)
    theirs = copy.deepcopy(ours)
    d2t = torch.randperm(2 * vocab, device=device)[:vocab] if has_d2t else None
    for level in range(shape.num_levels):
        both = [level_of(*each, level, d2t_W=d2t) for each in (ours, theirs)]
        P = both[0].rows_per_req
        logits = 3 * torch.randn(NUM_REQS * P, vocab, device=device)
        logits[0] = -torch.inf  # no choice
        logits[P, :-2] = -torch.inf  # fewer than k
        logits[2 * P] = logits[2 * P].round()  # ties
        noise = drawn(logits, P, level, d2t) if is_sampled else None
        by_kernel(write_level)(logits, both[0], noise)
        write_level_ref(logits, both[1], noise)
        # equal to the bit, so that no tie is broken otherwise
        assert torch.allclose(
            ours[0].candidates.scores, theirs[0].candidates.scores, 0, 1e-5, equal_nan=True
        )
        ours[0].candidates.scores.copy_(theirs[0].candidates.scores)
    launch_keep_nodes(NUM_REQS, both[0])
    assert_kept(ours, theirs, shape, shape.num_levels)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_head_of_width_one_serves_no_other_width(device, shape):
    ours = mapped(device, shape)
    theirs = copy.deepcopy(ours)
    normed, weight = torch.randn(NUM_REQS, D, device=device), torch.randn(V, D, device=device)
    by_kernel(propose_level)(normed, weight, level_of(*ours, 0))
    propose_by_twin(normed, weight, level_of(*theirs, 0))
    assert_same(ours, theirs)
    best = (normed @ weight.t()).topk(shape.top_k).indices
    assert ours[0].candidates.tokens[:NUM_REQS, : shape.top_k].tolist() == best.tolist()


def test_of_zeros_of_either_sign_the_lower_id_is_the_better_child(device):
    """Within a tile of columns and between tiles."""
    given = mapped(device, TreeShape(num_levels=1, top_k=5, num_nodes=5))
    logits = torch.full((NUM_REQS, 1100), -1.0, device=device)
    zeros = [6, 9, 20, 1030, 1090]
    logits[:, zeros] = torch.tensor([-0.0, 0.0, -0.0, -0.0, 0.0], device=device)
    for write in (by_kernel(write_level), write_level_ref):
        buffers, state = copy.deepcopy(given)
        write(logits, level_of(buffers, state, 0), None)
        assert buffers.candidates.tokens[:NUM_REQS].tolist() == [zeros] * NUM_REQS


@pytest.mark.parametrize("stops", [False, True])
def test_fewer_levels_keep_no_node_of_later_ones(device, stops):
    """What an earlier draft left in the places of later levels is better than all of its nodes."""
    shape = TreeShape(num_levels=4, top_k=3, num_nodes=9, smaller=((5, 2, 4),))
    ours = mapped(device, shape)
    ours[0].candidates.scores.fill_(9.0)
    ours[0].candidates.tokens.fill_(777)
    theirs = copy.deepcopy(ours)
    threshold = torch.tensor([-1.0], device=device) if stops else None
    for level in range(2):
        both = [level_of(*each, level, 2, threshold=threshold) for each in (ours, theirs)]
        logits = 3 * torch.randn(NUM_REQS * both[0].rows_per_req, 50, device=device)
        by_kernel(write_level)(logits, both[0], None)
        write_level_ref(logits, both[1], None)
        ours[0].candidates.scores.copy_(theirs[0].candidates.scores)
    assert both[0].is_last
    launch_keep_nodes(NUM_REQS, both[0])
    keep_nodes_ref(NUM_REQS, both[1])
    assert_kept(ours, theirs, shape, 2)
    rows = [row for row in ours[0].idx_mapping[:NUM_REQS].tolist() if row >= 0]
    assert (ours[1].draft_tokens[rows] < 50).all()
    assert max(max(depths(ours[1].draft_parents[row].tolist())) for row in rows) == 2


def test_every_next_row_has_a_node_of_its_own(device):
    """Whatever the last bits of scores: a rank that two nodes share leaves a row without one."""
    count, vocab = (300, 32000) if device.type == "cuda" else (3, 70)
    shape = SHAPES[0]
    buffers, state = mapped(device, shape)
    X = NUM_REQS * shape.top_k
    for seed in range(count):
        for level in range(2):
            to = level_of(buffers, state, level)
            num_rows = NUM_REQS * to.rows_per_req
            torch.manual_seed(seed)
            logits = 5 * torch.randn(num_rows, vocab, device=device)
            buffers.candidates.parent_rows.fill_(-1)
            launch_children(logits, to, drawn(logits, to.rows_per_req, level, None))
            parents = buffers.candidates.parent_rows[:X]
            assert ((parents >= 0) & (parents < num_rows)).all(), (seed, level)
            places = buffers.candidates.row_places[:NUM_REQS]
            assert all(len(set(of_slot)) == shape.top_k for of_slot in places.tolist())


def drawn(logits, rows_per_req, level, d2t):
    """Make noise for greedy and sampled requests, with and without a floor."""
    device = logits.device
    temperature = torch.tensor([0.7, 0.0, 1.0, 0.0, 1.3, 0.5], device=device)
    floor = torch.tensor([-torch.inf, 1e9, 1.0, 0.0, -2.0, -torch.inf], device=device)
    X = len(logits)
    keys = NoiseKeys(
        temperatures=temperature.repeat_interleave(rows_per_req),
        seeds=torch.arange(NUM_REQS, device=device).repeat_interleave(rows_per_req)[:, None]
        * torch.tensor([[3, 5]], device=device),
        positions=torch.full((X,), 9 + level, device=device),
        epochs=torch.zeros(X, dtype=torch.int64, device=device),
        stream=TARGET,
        token_ids=d2t,
    )
    return Perturbation(floor.repeat_interleave(rows_per_req), keys)


@pytest.mark.parametrize("num_reqs", [1, 3])
@pytest.mark.parametrize("level", [0, 1, None])
def test_rows_are_drawn_with_the_noise_of_their_requests_next_position(
    device, num_reqs, level, monkeypatch
):
    """A single request counts too: its mapping repeats without a copy."""
    monkeypatch.setattr(row_parameters, "use_triton", lambda _: True)
    buffers, state = make(device, 3) if level is None else make_wide(device, SHAPES[0])
    rows = torch.tensor([4, 0, 2], device=device)
    buffers.sample_mapping[:3] = rows
    buffers.draft_positions[:3] = state.num_computed_tokens[rows] + 1  # of a third level's rows
    state.sampling.seeds[:] = torch.randint(0, 1 << 31, state.sampling.seeds.shape)
    to = level_of(buffers, state, level)
    logits = torch.zeros(num_reqs * to.rows_per_req, 40, device=device)
    keys = perturbation(to, logits, "exact").noise_keys
    row_X = rows[:num_reqs].repeat_interleave(to.rows_per_req)
    assert torch.equal(keys.seeds, state.sampling.seeds[row_X])
    depth = 3 if level is None else level + 1
    assert torch.equal(keys.positions, state.num_computed_tokens[row_X] + depth)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whatever_parents_are_named_there_is_room_for_their_rows(shape):
    """A warm-up of the levels alone finds those of the last level that ran."""
    buffers, _ = make_wide("cpu", shape)
    assert len(buffers.draft_hidden) >= len(buffers.candidates.parent_rows)
