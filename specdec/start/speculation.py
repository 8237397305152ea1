"""The number of tokens that are drafted, and whether their rows are shared out by what pays."""

import logging
from dataclasses import dataclass, replace

from specdec.sizes import TreeShape
from specdec.speculative_config import AUTO, SpeculativeConfig
from weights.draft.config import DraftConfig

logger = logging.getLogger("specdec")

MOST_LEVELS = 8  # that "auto" may run
FIXED_DRAFTS = 3  # of "auto" where nothing is measured
# that "auto" may draft: 3 to 8 requests verify 48 to 64 rows, which cost hardly more than 40
AUTO_TREE = TreeShape(
    num_levels=MOST_LEVELS, top_k=4, num_nodes=15, smaller=((2, 6, 15), (5, 6, 9), (7, 5, 7))
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an engine drafts.

    num_tokens: K, the most drafts that a round can accept; 0: plain decoding
    tree: the shape of each request's drafts, with is_adaptive in some rounds; None: chains
    confidence_threshold: of the mean best path, below which drafts stop; 0: never; None: the one
        that pays
    """

    num_tokens: int
    is_adaptive: bool = False
    tree: TreeShape | None = None
    confidence_threshold: float | None = 0.0

    @property
    def num_nodes(self) -> int:
        """Count the drafts that a request verifies: all nodes of a tree."""
        return self.num_tokens if self.tree is None else self.tree.num_nodes

    @property
    def has_fixed_tree(self) -> bool:
        """Whether each round drafts the tree."""
        return self.tree is not None and not self.is_adaptive

    @property
    def name(self) -> int | str:
        if self.tree is None or self.is_adaptive:
            return AUTO if self.is_adaptive else self.num_tokens
        return f"{self.tree.num_rows}x{self.tree.num_levels}x{self.tree.top_k}"


def drafting_of(speculation: SpeculativeConfig | None, has_graphs: bool) -> Drafting:
    """has_graphs: on a GPU with graphs, whose rounds cost what the start measures."""
    if speculation is None:
        return Drafting(0)
    given = speculation.num_speculative_tokens
    threshold = speculation.draft_confidence_threshold
    if speculation.has_fixed_tree:
        assert isinstance(given, int), given
        count = speculation.num_draft_tokens
        num_nodes = given if count is None else count
        tree = TreeShape(num_levels=given, top_k=speculation.top_k or 1, num_nodes=num_nodes)
        return Drafting(given, tree=tree, confidence_threshold=threshold or 0.0)
    wanted = speculation.adaptive is not False and given != 0
    obstacle = None
    if speculation.acceptance != "exact":
        obstacle = (
            f"acceptance={speculation.acceptance!r}: adaptive drafting needs acceptance='exact'"
        )
    elif not has_graphs:
        obstacle = "rounds are measured with graphs on a GPU only"
    is_adaptive = wanted and obstacle is None
    if wanted and obstacle is not None:
        logger.info("the number of drafts does not adapt: %s", obstacle)
    if threshold is None and not is_adaptive:
        threshold = 0.0
    if isinstance(given, int):
        return Drafting(given, is_adaptive, confidence_threshold=threshold)
    if not is_adaptive:
        return Drafting(FIXED_DRAFTS, confidence_threshold=threshold)
    offered = AUTO_TREE if speculation.top_k is None else None
    return Drafting(MOST_LEVELS, True, offered, threshold)


def of_draft(drafting: Drafting, draft_vocab_size: int) -> Drafting:
    """Draft chains alone where "auto" may draft trees, but the draft knows too few tokens."""
    tree = drafting.tree
    if not drafting.is_adaptive or tree is None or draft_vocab_size >= tree.top_k:
        return drafting
    line = "no draft trees of top_k=%d: the draft knows %d tokens"
    logger.info(line, tree.top_k, draft_vocab_size)
    return replace(drafting, tree=None)


def of_checkpoint(
    drafting: Drafting, speculation: SpeculativeConfig, draft: DraftConfig
) -> Drafting:
    """Draft as the checkpoint's kind can; ValueError for what it cannot."""
    if draft.is_parallel:
        return _in_parallel(drafting, speculation, draft)
    return of_draft(drafting, draft.draft_vocab_size)


def _in_parallel(
    drafting: Drafting, speculation: SpeculativeConfig, draft: DraftConfig
) -> Drafting:
    """Draft a block in every round, or a tree from it; if it adapts, also half of one or none."""
    given, kind = speculation.num_speculative_tokens, f"a {draft.method} draft"
    if isinstance(given, int):
        check_number(given, draft)
    refused = {
        "draft_confidence_threshold": (
            bool(speculation.draft_confidence_threshold),
            f"{kind} proposes all its tokens in one pass, and stopping would spare nothing",
        ),
    }
    if not draft.grows_trees:
        refused |= {"top_k": (speculation.has_fixed_tree, f"{kind} proposes chains alone")}
    for name, (is_given, why) in refused.items():
        if is_given:
            raise ValueError(f"{name}={getattr(speculation, name)!r}: {why}: leave it out")
    if speculation.has_fixed_tree:
        return drafting
    number = given if isinstance(given, int) else usual_number(draft)
    found = of_blocks(drafting, draft, number)
    most = f"{number} tokens for every request"
    if found.is_adaptive:
        most = f"up to {number} tokens{' or a tree' if found.tree else ''}, as it pays"
    logger.info("%s proposes %s, in one pass", kind, most)
    return found


def of_blocks(drafting: Drafting, draft: DraftConfig, number: int) -> Drafting:
    """Draft `number` tokens in one pass, or at most; trees of "auto" have as many levels."""
    tree = drafting.tree if draft.grows_trees and number > 1 else None
    tree = None if tree is None else tree.within(number)
    return of_draft(Drafting(number, drafting.is_adaptive, tree), draft.draft_vocab_size)


def usual_number(draft: DraftConfig) -> int:
    """Choose as many drafts as a parallel draft was trained to propose, and at most 8."""
    return min(draft.trained_drafts or draft.max_drafts, MOST_LEVELS)


def check_number(num_drafts: int, draft: DraftConfig) -> None:
    """Refuse more drafts than a block has: ValueError."""
    if num_drafts > draft.max_drafts:
        kind = f"a {draft.method} draft with blocks of {draft.block_rows(draft.max_drafts)} rows"
        most = f"{kind} proposes at most {draft.max_drafts}"
        raise ValueError(f"num_speculative_tokens={num_drafts}: {most}")
