"""EAGLE-2's dynamic draft tree (arXiv 2406.16858) under exact acceptance, node by node in float32.

Level 1 holds the top_k best children of the root, the last committed token. For each further level
the top_k best nodes of the level before get top_k children each. The num_rows - 1 best nodes of all
levels are kept for the target to verify. A child's score is log softmax(z + T * g)[child], summed
along its path: z are the draft's logits, T the temperature, g the public noise of the position.
The walk goes from the root to the child that equals the target's own choice, as long as there is
one: the text is that of plain decoding, whatever the tree was.

Every node is the end of a plain causal chain: its cache is a copy of its parent's with one row
more, so no attention mask is needed. The target decodes plainly, and the walk follows it through
the tree. Imports nothing of ours.

    decoding = TreeDecoding(target, cfg, weights, prompt, Shape(8, 6, 4), Sampling(0.7, seed=1))
    each = decoding.round()
    each.tree.rows(), each.walk, each.last_token

W draft vocabulary, V the target's, E width of the target's features, X of what a draft row reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.naive_eagle import draft_ids, forward, fuse, gumbel, target_features
from tests.reference import Cache, Reference, Weights

ROOT = -1


class Shape(NamedTuple):
    num_rows: int  # verified per round, the root's included
    num_levels: int
    top_k: int  # children of an expanded node, and nodes expanded per level


class Sampling(NamedTuple):
    temperature: float = 0.0
    seed: int = 0

    def perturbed(self, logits_V: Tensor, position: int, ids_V: Tensor) -> Tensor:
        """z + T * g in float64: the token at a position is the best of these."""
        if self.temperature == 0:
            return logits_V.double()
        return logits_V.double() + self.temperature * gumbel(self.seed, position, ids_V)


GREEDY = Sampling()


class Node(NamedTuple):
    token: int  # the target's id
    parent: int  # index of the node that it follows, or ROOT
    depth: int  # 1 for a child of the root
    score: float  # log probability of its path


@dataclass(frozen=True)
class Tree:
    """All nodes in the order in which they were drafted, and the indices of those to verify.

    kept:   best first, of equal nodes the earlier first: no node comes before its parent
    margin: the smallest gap in score between what was just taken and what was just left, over the
            choices (of children, of nodes to expand, of nodes to keep) on which `kept` depends
    """

    nodes: list[Node]
    kept: list[int]
    margin: float

    def child(self, parent: int, token: int) -> int | None:
        """The kept child of a node (or of ROOT) that has this token."""
        for i in self.kept:
            if self.nodes[i].parent == parent and self.nodes[i].token == token:
                return i
        return None

    def path(self, index: int) -> list[int]:
        """The tokens from the root's child to a node."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.insert(0, self.nodes[index].token)
            index = self.nodes[index].parent
        return tokens

    def rows(self) -> list[Node]:
        """The kept nodes, with rows for parents: row 0 is the root, row 1 the best node."""
        row_of = {index: row for row, index in enumerate([ROOT, *self.kept])}
        kept = [self.nodes[i] for i in self.kept]
        return [node._replace(parent=row_of[node.parent]) for node in kept]


class DraftRow(NamedTuple):
    """The end of a chain of the draft: what it predicts, and what its next row needs."""

    logits_W: Tensor
    hidden_1X: Tensor
    cache: Cache


Step = Callable[[DraftRow, int], DraftRow]  # the row that follows when this id of the target's does
Scores = Callable[[Tensor, int], Tensor]  # of the logits of a row, whose children have this depth


def draft_tree(root: DraftRow, step: Step, scores: Scores, ids_W: Tensor, shape: Shape) -> Tree:
    """Grow the tree level by level, then choose the nodes to keep.

    ids_W: the target's id of each of the draft's
    """
    nodes: list[Node] = []
    cuts: list[Cut] = []
    rows, expanded = {ROOT: root}, [ROOT]
    for depth in range(1, shape.num_levels + 1):
        level = len(nodes)
        for parent in expanded:
            path = 0.0 if parent == ROOT else nodes[parent].score
            scores_W = path + scores(rows[parent].logits_W, depth).log_softmax(-1)
            children = best(scores_W, shape.top_k, cuts)
            nodes += [Node(int(ids_W[i]), parent, depth, float(scores_W[i])) for i in children]
        if depth < shape.num_levels:
            expanded = [level + i for i in best(path_scores(nodes[level:]), shape.top_k, cuts)]
            rows |= {i: step(rows[nodes[i].parent], nodes[i].token) for i in expanded}
    kept = best(path_scores(nodes), shape.num_rows - 1, cuts)
    least = nodes[kept[-1]].score
    margins = [cut.taken - cut.left for cut in cuts if cut.taken >= least]
    return Tree(nodes, kept, min(margins, default=math.inf))


class Cut(NamedTuple):
    """Path scores on both sides of a choice: the worst taken, the best left."""

    taken: float
    left: float


def best(scores_X: Tensor, count: int, cuts: list[Cut]) -> list[int]:
    """Places of the best scores, the first of equal ones first."""
    found_X, order_X = scores_X.sort(descending=True, stable=True)
    if len(found_X) > count:
        cuts.append(Cut(*found_X[count - 1 : count + 1].tolist()))
    return order_X[:count].tolist()


def path_scores(nodes: list[Node]) -> Tensor:
    return torch.tensor([node.score for node in nodes], dtype=torch.float64)


@dataclass(frozen=True)
class Round:
    """tokens: the prompt and what was committed before this round; the last of them is the root."""

    tokens: list[int]
    tree: Tree
    walk: list[int]  # the accepted nodes, indices of tree.nodes
    last_token: int  # the target's choice after them


class TreeDecoding:
    """Decodes a prompt round by round; `tokens` are the prompt and all committed tokens."""

    def __init__(
        self,
        target: Reference,
        cfg: Any,
        weights: Weights,
        prompt: list[int],
        shape: Shape,
        sampling: Sampling = GREEDY,
    ) -> None:
        self.target, self.cfg, self.weights = target, cfg, weights
        self.shape, self.sampling = shape, sampling
        self.tokens, self.target_cache = list(prompt), Cache()
        self.features: list[Tensor] = []  # [1, E] of each token that the target has seen
        self.draft_cache = Cache()  # of committed pairs only, whose features are the target's
        self.num_pairs = 0  # that draft_cache holds
        self.decode()

    def decode(self) -> int:
        """Commit the target's next token, as plain decoding does."""
        outputs = self.target.forward(self.tokens[len(self.features) :], self.target_cache)
        features_TE = target_features(self.cfg, outputs.boundaries, outputs.hidden_TD)
        self.features += features_TE.split(1)
        logits_V = outputs.logits_TV[-1]
        scores_V = self.sampling.perturbed(logits_V, len(self.tokens), torch.arange(len(logits_V)))
        self.tokens.append(int(scores_V.argmax()))
        return self.tokens[-1]

    def round(self) -> Round:
        tokens, tree = list(self.tokens), self.propose()
        walk: list[int] = []
        node: int | None = ROOT
        while node is not None:
            token = self.decode()
            node = tree.child(node, token)
            walk += [node] if node is not None else []
        return Round(tokens, tree, walk, token)

    @torch.no_grad()
    def propose(self) -> Tree:
        """The tree that follows the committed tokens."""
        ids_W, num_tokens = draft_ids(self.cfg, self.weights), len(self.tokens)

        def scores(logits_W: Tensor, depth: int) -> Tensor:
            return self.sampling.perturbed(logits_W, num_tokens + depth - 1, ids_W)

        return draft_tree(self.seed_row(), self.step, scores, ids_W, self.shape)

    def seed_row(self) -> DraftRow:
        """Feed the draft the pairs that are new: a token and the feature of the one before it."""
        rows_TX = torch.cat(self.features[self.num_pairs :])
        if self.cfg.entry != "fc":
            rows_TX = fuse(self.cfg, self.weights, rows_TX)
        tokens = self.tokens[self.num_pairs + 1 :]
        self.num_pairs = len(self.features)
        return self.extend(tokens, rows_TX, self.draft_cache)

    def step(self, row: DraftRow, token: int) -> DraftRow:
        # forward puts longer tensors into a cache and changes none: a copied dict is a fork
        return self.extend([token], row.hidden_1X, dict(row.cache))

    def extend(self, tokens: list[int], rows_TX: Tensor, cache: Cache) -> DraftRow:
        logits_TW, hidden_TX = forward(self.cfg, self.weights, tokens, rows_TX, cache)
        return DraftRow(logits_TW[-1], hidden_TX[-1:], cache)


@dataclass(frozen=True)
class Generation:
    tokens: list[int]
    rounds: list[Round]
    num_accepted: list[int]  # per round, not counting nodes past the tokens asked for

    def num_accepted_at(self, num_levels: int) -> list[int]:
        """How many rounds accepted a node of each depth."""
        depths = range(1, num_levels + 1)
        return [sum(accepted >= depth for accepted in self.num_accepted) for depth in depths]


def generate(decoding: TreeDecoding, num_tokens: int) -> Generation:
    """Decode num_tokens after the prompt, EOS or not, from a new decoding.

    The first token comes from the prompt alone and belongs to no round.
    """
    start = len(decoding.tokens) - 1
    end, rounds = start + num_tokens, []
    while len(decoding.tokens) < end:
        rounds.append(decoding.round())
    accepted = [min(len(each.walk), end - len(each.tokens)) for each in rounds]
    return Generation(decoding.tokens[start:end], rounds, accepted)
