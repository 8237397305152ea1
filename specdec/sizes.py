"""The sizes of an engine, resolved once, and the limits that host and device share."""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

BLOCK_SIZE = 64  # tokens per cache block: one attention tile
MOST_SHARED_ROWS = 512  # beyond, each row of a round costs more than a draft is worth
MAX_TREE_REQUESTS = 32  # with more at a time, chains accept as much from as many rows
MAX_AUTO_TREE_REQUESTS = 8  # with more at a time, chains that share their rows out accept as much
MAX_STOP_IDS = 64  # ids that min_tokens can mask, per request
MAX_BAD_WORDS = 64  # token sequences, per request
MAX_BAD_WORD_LENGTH = 16  # tokens


class DraftShape(NamedTuple):
    """What is drafted for a request: `levels` levels, of which the best `nodes` nodes are verified.

    The first level has `width` nodes; each further one gives `width` children to `width` nodes. A
    request verifies a row for each node, and one for its last sampled token. Width 1 is a chain.
    """

    levels: int
    width: int
    nodes: int

    @property
    def rows(self) -> int:
        return self.nodes + 1

    @property
    def path_len(self) -> int:
        """Count the rows of the longest path: in a chain all of them."""
        return min(self.levels, self.nodes) + 1

    @property
    def is_wide(self) -> bool:
        return self.width > 1


PLAIN = DraftShape(0, 1, 0)  # no drafts: one row verifies; the draft only extends its cache
IDLE = DraftShape(0, 0, 0)  # the draft does not even run


def chain(num_tokens: int) -> DraftShape:
    return DraftShape(num_tokens, 1, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """A draft tree: top_k nodes in its first level, then top_k children of top_k nodes each.

    smaller: (num_requests, num_levels, num_nodes) of steps with at least that many requests, by
        requests, from 2 on. None has more levels or nodes than the one before it. All have at least
        2 levels with num_nodes candidates: fewer requests may verify such a tree in the next step.
    """

    num_levels: int  # D, levels that are drafted
    top_k: int  # k
    num_nodes: int  # N - 1, nodes that are verified
    smaller: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        before = (1, self.num_levels, self.num_nodes)
        for each in self.smaller:
            first, num_levels, num_nodes = each
            num_candidates = self.of(first).num_candidates
            is_larger = num_levels > before[1] or num_nodes > before[2]
            if first <= before[0] or is_larger or num_levels < 2 or num_candidates < self.num_nodes:
                raise ValueError(
                    f"smaller={self.smaller}, {each}: more than {before[0]} requests, 2 to "
                    f"{before[1]} levels and at most {before[2]} nodes, and levels that have "
                    f"{self.num_nodes} candidates or more"
                )
            before = each

    @property
    def first_requests(self) -> tuple[int, ...]:
        """List the fewest requests that each shape is for, ascending."""
        return (1, *(first for first, _, _ in self.smaller))

    def of(self, num_reqs: int) -> "TreeShape":
        """Choose the shape of a step with this many requests, padding included or not."""
        return _shape_of(self, num_reqs)

    def within(self, num_levels: int) -> "TreeShape":
        """Cut trees to this many levels, at least 2."""
        smaller = tuple((n, min(levels, num_levels), nodes) for n, levels, nodes in self.smaller)
        return replace(self, num_levels=min(self.num_levels, num_levels), smaller=smaller)

    @property
    def drafts(self) -> DraftShape:
        return DraftShape(self.num_levels, self.top_k, self.num_nodes)

    @property
    def num_rows(self) -> int:
        """Count the rows of a request that verifies: the root and all nodes."""
        return self.num_nodes + 1

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path that can be verified: all its nodes are."""
        return min(self.num_levels, self.num_nodes)

    @property
    def path_len(self) -> int:
        """Rows of the longest path, with the root: at most as many as the tree has."""
        return self.max_depth + 1

    @property
    def num_candidates(self) -> int:
        """Count the nodes of all levels, of which the best are verified."""
        return self.top_k + self.top_k**2 * (self.num_levels - 1)


@cache
def _shape_of(tree: TreeShape, num_reqs: int) -> TreeShape:
    for first, num_levels, num_nodes in reversed(tree.smaller):
        if num_reqs >= first:
            return replace(tree, num_levels=num_levels, num_nodes=num_nodes, smaller=())
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    num_speculative_tokens: int  # K, or levels of a tree; 0 is plain decoding, with a draft or not
    is_adaptive: bool = False  # rows of a round are shared out, and levels chosen, by what pays
    # None: all drafts are chains; with is_adaptive they are chains or trees, from step to step
    tree: TreeShape | None = None
    # rows of a request in the one pass of a parallel draft: K, and one if the anchor's proposes
    # nothing, or one less if the row before it proposes the first; 0: it drafts level by level.
    # With is_adaptive some blocks are shorter
    block_rows: int = 0

    def __post_init__(self) -> None:
        if self.has_both and self.path_len != self.num_speculative_tokens + 1:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens}, but the longest path of "
                f"{self.tree} has {self.path_len - 1} nodes: chains and trees share their results"
            )

    @property
    def has_both(self) -> bool:
        """Whether drafts are chains or trees, from step to step."""
        return self.is_adaptive and self.tree is not None

    @property
    def widest(self) -> DraftShape:
        """Return the shape that holds all others: its paths are the longest, of chains too."""
        return chain(self.num_speculative_tokens) if self.tree is None else self.tree.drafts

    @property
    def num_draft_tokens(self) -> int:
        """Count the drafts that a request verifies: K of a chain; all nodes if all are trees."""
        return self.shape_of(1).nodes

    def shape_of(self, num_reqs: int, is_wide: bool = False) -> DraftShape:
        """Choose what is drafted for each of so many requests, at most.

        is_wide: trees rather than chains, where a planner chooses between them
        """
        if self.tree is None or (self.is_adaptive and not is_wide):
            return chain(self.num_speculative_tokens)
        return self.tree.of(num_reqs).drafts

    @property
    def chain_lengths(self) -> tuple[int, ...]:
        """List how many tokens a chain may have: K; if it adapts, any number, or half a block."""
        K = self.num_speculative_tokens
        if not self.is_adaptive:
            return (K,)
        return tuple(sorted({-(-K // 2), K})) if self.block_rows else tuple(range(1, K + 1))

    @property
    def query_len(self) -> int:
        """Rows per request of a round: the last sampled token and its drafts."""
        return self.num_draft_tokens + 1

    @property
    def extra_rows(self) -> int:
        """Count the rows of a block beyond its drafts: 1, 0, or after seeds -1."""
        return self.block_rows - self.num_speculative_tokens

    def rows_of_block(self, num_tokens: int) -> int:
        """Count a request's rows in the pass that proposes so many tokens, of seeds the others.

        It has none, and does not run, where seeds propose the only token.
        """
        return num_tokens + self.extra_rows

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """List how many tokens a chain may have that needs such a pass."""
        lengths = self.chain_lengths if self.block_rows else ()
        return tuple(n for n in lengths if self.rows_of_block(n) > 0)

    @property
    def anchor_rows(self) -> int:
        """Count the rows of a request's block that propose nothing, 0 or 1."""
        return max(self.extra_rows, 0)

    @property
    def has_seeds(self) -> bool:
        """Whether the draft proposes the first token as it extends its KV."""
        return self.extra_rows < 0

    @property
    def path_len(self) -> int:
        """Rows per request on the longest path through a round: of a chain all of them, K + 1."""
        return self.widest.path_len

    @property
    def max_tree_requests(self) -> int:
        """Count the slots of the largest step that drafts trees, or verifies them."""
        if self.tree is None:
            return 0
        most = self.max_num_seqs
        return min(most, MAX_AUTO_TREE_REQUESTS) if self.is_adaptive else most

    @property
    def first_node_slot(self) -> int:
        """Return the first cache slot after the pool: nodes with paths lie from there on."""
        return self.num_kv_blocks * BLOCK_SIZE

    @property
    def num_tree_blocks(self) -> int:
        """Count the blocks after the pool for the nodes that a target verifies, of all requests."""
        return -(-self.max_tree_requests * self.widest.nodes // BLOCK_SIZE)

    @property
    def num_draft_tree_blocks(self) -> int:
        """Count the blocks for the draft's levels but the first, whose rows are committed pairs.

        A draft that proposes blocks runs no rows of nodes.
        """
        if self.block_rows:
            return 0
        rows = self.widest.width * (self.widest.levels - 1)
        return -(-self.max_tree_requests * rows // BLOCK_SIZE)

    @property
    def num_state_rows(self) -> int:
        """Count state rows, more than requests: one is free once no step in flight writes it."""
        return self.max_num_seqs + self.max_num_seqs // 8 + 1

    @property
    def max_verify_rows(self) -> int:
        most = self.max_num_seqs * self.query_len
        if not self.is_adaptive:
            return most
        of_chains = min(most, max(MOST_SHARED_ROWS, 2 * self.max_num_seqs))
        return max(of_chains, self.max_tree_requests * self.widest.rows)

    @property
    def max_num_rows(self) -> int:
        """Count the rows of the largest step: all requests verify, and prompts ride along."""
        return self.max_verify_rows + self.max_num_batched_tokens

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // BLOCK_SIZE)

    @property
    def most_keys(self) -> int:
        return self.blocks_per_request * BLOCK_SIZE
