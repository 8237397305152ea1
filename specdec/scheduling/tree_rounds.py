"""When drafts are trees rather than chains: what trees bring, learned beside what chains bring.

The chain of a request is a path of its tree: the draft's best token after each node. So a round of
trees shows both how many drafts hold and how many would have held in chains. The ratio of the two
is learned from few rounds; harder or easier texts change it little. What chains bring is known
from rounds of chains and from the chains in trees. A few rounds of the kind that was not chosen
run every now and then (probes.py).
"""

from specdec.scheduling.probes import KindProbes, Surprise

PRIOR = 1.15  # drafts of trees that hold for each of a chain, before any tree was seen
# weights in drafts of chains that hold
PRIOR_WEIGHT = 20.0
RUNNING_MEMORY = 800.0  # where trees run all the time
PROBED_MEMORY = 200.0  # where they run in probes
AHEAD = 0.015  # by which the other kind must be faster to be chosen instead
# A round of chains ends at the first token that is not the likeliest, one of trees where none of
# several likely ones fits, and after that more drafts hold: in 60 texts 1 to 9 % more, of chains
# of 4 and 5 levels and of trees. Ratios within one and the same round do not show it. In tokens
# this is less; of 1.00 to 1.04 the last two did best on average with the outcomes of these texts.
BETTER_STARTS = 1.03
CHECK_EVERY = 8  # rounds of trees


class TreeGain:
    """Drafts of trees that hold for each that holds in chains of all levels: two fading sums."""

    def __init__(self) -> None:
        self._in_trees = PRIOR * PRIOR_WEIGHT
        self._in_chains = PRIOR_WEIGHT

    @property
    def ratio(self) -> float:
        return self._in_trees / self._in_chains

    def add(self, in_trees: int, in_chains: int, memory: float) -> None:
        """Drafts that held in a round. memory: the most weight that is kept."""
        self._in_trees += in_trees
        self._in_chains += in_chains
        kept = min(memory / self._in_chains, 1.0)
        self._in_trees *= kept
        self._in_chains *= kept


class TreeRounds:
    """Learns what trees bring, and chooses between them and all else.

    num_levels: of a tree, and of the longest chain
    """

    def __init__(self, num_levels: int) -> None:
        self.is_chosen = False
        self._gain = TreeGain()
        self._probes = KindProbes()
        self._surprise = Surprise()
        self._num_levels = num_levels
        self._num_rounds = 0

    def held(self, in_chains: float, num_drafting: int) -> float:
        """Drafts of a round that will hold. in_chains: the same in chains of all levels."""
        return min(self._gain.ratio * in_chains, float(num_drafting * self._num_levels))

    def choose(self, tree_rate: float, other_rate: float, drafts_pay: bool = True) -> bool:
        """Whether the next drafts are trees, by rates of tokens per millisecond.

        drafts_pay: else the other way is to draft nothing, and chains find out when that changes:
            trees are no probe
        """
        tree_rate *= BETTER_STARTS  # what is known of both comes from rounds of the one that runs
        least = other_rate * (1 - AHEAD if self.is_chosen else 1 + AHEAD)
        if (tree_rate > least) != self.is_chosen:
            self.is_chosen = not self.is_chosen
            self._probes.reset()
        slower, faster = sorted((tree_rate, other_rate))
        may_probe = drafts_pay or self.is_chosen
        is_probe = may_probe and self._probes.is_due(1 - slower / faster)
        return self.is_chosen != is_probe

    def observe(
        self, num_held: int, num_on_chains: int, expected: float, num_drafting: int, num_known: int
    ) -> bool:
        """Learn from a round of trees; returns whether nothing had foretold rounds like these.

        num_on_chains: of the drafts that held, those that chains would have had
        expected: drafts that would hold, by a sample of num_known
        """
        self._gain.add(num_held, num_on_chains, RUNNING_MEMORY if self.is_chosen else PROBED_MEMORY)
        self._surprise.add(expected, num_held, num_drafting, num_known)
        self._num_rounds += 1
        return self._num_rounds % CHECK_EVERY == 0 and self._surprise.has_changed(False)
