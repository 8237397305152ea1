"""The shipped accept code, enumerated: all drafts of two tokens, all coins, laws of three tokens.

The borders between the outcomes are found by bisection of each coin on the code itself: the only
assumption is that an outcome changes at most once along a coin. In float64, where bisection stops
at 2^-60 and a law is a sum of some hundred products, the bound of 1e-12 leaves a factor of a
hundred. A round that stops early goes on by the target's law.
"""

import itertools
import math
from functools import cache

import pytest
import torch

from specdec.sampler.accept import RULES, Decision, Drafted, block_odds, coins_pass, prefix_probs

V, K = 3, 2
EPS = 2.0**-60


class Pair:
    """Random conditional laws of a target and a draft, by prefix."""

    def __init__(self, seed, is_point=False, hidden=None):
        made = torch.Generator().manual_seed(seed)

        def law():
            return torch.rand(V, generator=made, dtype=torch.float64).pow(2).softmax(0) ** 2

        prefixes = [x for n in range(K + 1) for x in itertools.product(range(V), repeat=n)]
        self.target = {x: normal(law()) for x in prefixes}
        self.draft = {x: normal(law()) for x in prefixes if len(x) < K}
        if hidden is not None:  # the draft does not know this token
            self.draft = {x: normal(q * (torch.arange(V) != hidden)) for x, q in self.draft.items()}
        self.drawn = self.draft  # what drafts are really drawn from
        if is_point:
            self.drawn = {
                x: torch.nn.functional.one_hot(q.argmax(), V).double()
                for x, q in self.draft.items()
            }

    def joint(self):
        """The target's law of three tokens."""
        return torch.stack(
            [
                self.target[()][a] * self.target[(a,)][b] * self.target[(a, b)]
                for a, b in itertools.product(range(V), repeat=2)
            ]
        ).view(V, V, V)


def normal(weights):
    return weights / weights.sum()


def law_of(accept, pair, claimed=None):
    """The law of the three tokens from the start of a round, and the mean number that it gives.

    claimed: the probabilities that `accept` is told, if not those that the drafts are drawn from
    """
    claimed = pair.drawn if claimed is None else claimed
    law, mean = torch.zeros(V, V, V, dtype=torch.float64), 0.0
    for a, b in itertools.product(range(V), repeat=2):
        weight = pair.drawn[()][a] * pair.drawn[(a,)][b]
        if weight == 0:
            continue
        drafted = Drafted(
            target_probs_BQV=torch.stack([pair.target[()], pair.target[(a,)], pair.target[(a, b)]])[
                None
            ],
            draft_probs_BKV=torch.stack([claimed[()], claimed[(a,)]])[None],
            draft_tokens_BK=torch.tensor([[a, b]]),
            num_drafts_B=torch.tensor([K]),
        )
        for coins, volume in boxes(accept, drafted):
            decision = accept(drafted, torch.tensor([coins], dtype=torch.float64))
            num_accepted, next_V = int(decision.num_accepted_B), normal(decision.weights_BV[0])
            mean += float(weight * volume * (num_accepted + 1))
            for token in range(V):
                prefix = (*(a, b)[:num_accepted], token)
                law[prefix] += weight * volume * next_V[token] * rest_of(pair, prefix)
    return law, mean


def rest_of(pair, prefix):
    """The target's law after a prefix, up to three tokens."""
    if len(prefix) == 3:
        return torch.tensor(1.0, dtype=torch.float64)
    law = pair.target[prefix]
    if len(prefix) == 2:
        return law
    return law[:, None] * torch.stack([pair.target[(*prefix, x)] for x in range(V)])


def boxes(accept, drafted):
    """Midpoints and volumes of the boxes of coins in which nothing changes."""
    edges = []
    for i in range(K):
        found = {0.0, 1.0}
        for others in itertools.product([EPS, 1 - 2.0**-53], repeat=K - 1):
            found |= border(accept, drafted, i, others)
        edges.append(sorted(found))
    for box in itertools.product(*[list(itertools.pairwise(line)) for line in edges]):
        yield [(low + high) / 2 for low, high in box], math.prod(high - low for low, high in box)


def border(accept, drafted, i, others):
    """Where the outcome changes along coin i."""

    def outcome(u):
        coins = [*others[:i], u, *others[i:]]
        return int(accept(drafted, torch.tensor([coins], dtype=torch.float64)).num_accepted_B)

    low, high = EPS, 1 - 2.0**-53
    first = outcome(low)
    if outcome(high) == first:
        return set()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if outcome(middle) == first else (low, middle)
    return {high}


def distance(law, pair):
    return float((law - pair.joint()).abs().sum() / 2)


PAIRS = [Pair(seed) for seed in range(4)] + [
    Pair(7, is_point=True),
    Pair(8, hidden=0),
    Pair(9, hidden=2),
]


@cache
def law_by(rule, pair):
    return law_of(RULES[rule], pair)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", PAIRS, ids=range(len(PAIRS)))
def test_the_law_is_the_targets(rule, pair):
    law, _ = law_by(rule, pair)
    assert distance(law, pair) < 1e-12


def test_block_gives_more_than_rejection_and_as_much_for_an_argmax_draft():
    for pair in PAIRS:
        (_, block), (_, rejection) = law_by("block", pair), law_by("rejection", pair)
        assert block >= rejection - 1e-12
        assert abs(block - rejection) < 1e-12 or pair.drawn is pair.draft
    assert sum(law_by("block", p)[1] - law_by("rejection", p)[1] for p in PAIRS) > 0.01


def test_a_draft_that_is_the_target_is_accepted_whole():
    pair = Pair(3)
    pair.drawn = {x: pair.target[x] for x in pair.draft}
    for rule in RULES.values():
        law, mean = law_of(rule, pair)
        assert distance(law, pair) < 1e-12
        assert mean == pytest.approx(K + 1)


def with_weights(rule, weights):
    def accept(drafted, coins):
        decision = RULES[rule](drafted, coins)
        b, n = torch.arange(len(coins)), decision.num_accepted_B
        target_BV = drafted.target_probs_BQV[b, n]
        draft_BV = drafted.draft_probs_BKV[b, n.clamp(max=K - 1)]
        return Decision(
            num_accepted_B=n,
            weights_BV=weights(decision, drafted, target_BV, draft_BV),
            is_bonus_B=decision.is_bonus_B,
        )

    return accept


def first_failure(drafted, coins):
    """Block verification that stops at the first coin that fails."""
    share = prefix_probs(drafted)
    passes = coins_pass(coins, *block_odds(drafted, share))
    n = passes.long().cumprod(1).sum(1)
    residual = (
        share[0, n] * drafted.target_probs_BQV[0, n]
        - drafted.draft_probs_BKV[0, n.clamp(max=K - 1)]
    ).clamp(min=0)
    weights = drafted.target_probs_BQV[0, n] if int(n) == K else residual
    return Decision(num_accepted_B=n, weights_BV=weights, is_bonus_B=n == K)


def token_shares(drafted, coins):
    """Block verification whose residual forgets the share of the block."""
    decision = RULES["block"](drafted, coins)
    n = decision.num_accepted_B
    rest = (drafted.target_probs_BQV[0, n] - drafted.draft_probs_BKV[0, n.clamp(max=K - 1)]).clamp(
        min=0
    )
    weights = decision.weights_BV if int(n) == K else rest
    return Decision(num_accepted_B=n, weights_BV=weights, is_bonus_B=decision.is_bonus_B)


def bonus_of_the_row_before(decision, drafted, target_BV, draft_BV):
    return torch.where(
        decision.is_bonus_B[:, None], drafted.target_probs_BQV[:, K - 1], decision.weights_BV
    )


WRONG = {
    "the recovered token is drawn from the target": with_weights(
        "rejection", lambda d, x, target, draft: target
    ),
    "the recovered token is the target without the draft's": with_weights(
        "rejection",
        lambda d, x, target, draft: torch.where(
            d.is_bonus_B[:, None],
            target,
            target.scatter(
                1, x.draft_tokens_BK.gather(1, d.num_accepted_B.clamp(max=K - 1)[:, None]), 0
            ),
        ),
    ),
    "the residual is not clamped at the draft": with_weights(
        "rejection",
        lambda d, x, target, draft: torch.where(
            d.is_bonus_B[:, None], target, (target - draft).abs()
        ),
    ),
    "the bonus token is drawn from the draft": with_weights(
        "rejection",
        lambda d, x, target, draft: torch.where(d.is_bonus_B[:, None], draft, d.weights_BV),
    ),
    "the bonus token is drawn from the row before": with_weights(
        "rejection", bonus_of_the_row_before
    ),
    "the bonus token is the best one": with_weights(
        "block",
        lambda d, x, target, draft: torch.where(
            d.is_bonus_B[:, None],
            torch.nn.functional.one_hot(target.argmax(1), V).double(),
            d.weights_BV,
        ),
    ),
    "block stops at the first failure": first_failure,
    "block forgets its share": token_shares,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_seen(name):
    assert max(distance(law_of(WRONG[name], pair)[0], pair) for pair in PAIRS[:2]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_false_word_about_the_drafts_law_is_seen(rule):
    point = Pair(7, is_point=True)
    assert (
        distance(law_of(RULES[rule], point, claimed=point.draft)[0], point) > 0.1
    )  # argmax drafts, softmax probabilities
    pair = Pair(1)
    sharper = {x: normal(q**1.5) for x, q in pair.draft.items()}  # another temperature
    assert distance(law_of(RULES[rule], pair, claimed=sharper)[0], pair) > 1e-3
    hidden = Pair(8, hidden=0)
    spread = {
        x: normal(q + 0.2) for x, q in hidden.draft.items()
    }  # some mass on ids that the draft has not
    assert distance(law_of(RULES[rule], hidden, claimed=spread)[0], hidden) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [0, 1])
def test_drafts_behind_a_requests_own_limit_are_never_accepted(rule, num_drafts):
    target = torch.eye(V, dtype=torch.float64)[[0, 1, 2]][None]
    drafted = Drafted(
        target_probs_BQV=target,
        draft_probs_BKV=target[:, :K],
        draft_tokens_BK=torch.tensor([[0, 1]]),
        num_drafts_B=torch.tensor([num_drafts]),
    )
    decision = RULES[rule](drafted, torch.full((1, K), 0.5, dtype=torch.float64))
    assert decision.num_accepted_B.tolist() == [num_drafts]
    assert decision.is_bonus_B.tolist() == [True]
    assert torch.equal(decision.weights_BV, target[:, num_drafts])


@pytest.mark.parametrize("rule", RULES)
def test_a_row_without_tokens_accepts_nothing_and_leaves_nothing(rule):
    drafted = Drafted(
        target_probs_BQV=torch.zeros(1, K + 1, V),
        draft_probs_BKV=torch.full((1, K, V), 1 / 3),
        draft_tokens_BK=torch.tensor([[0, 1]]),
        num_drafts_B=torch.tensor([K]),
    )
    decision = RULES[rule](drafted, torch.full((1, K), 1e-9, dtype=torch.float64))
    assert decision.num_accepted_B.tolist() == [0]
    assert decision.weights_BV.sum() == 0
