"""Trees of rows over a paged cache, and each node's path stored as an ordinary sequence.

Both lie in one cache: blocks for the keys below a tree, shared by both; scratch slots in random
order for the nodes; and for each node blocks of its own that hold the keys of its tail once more,
where plain decoding would have them. All other slots are NaN.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels.attention.query_rows import Paths, QueryRows, plan_tiles
from tests.specdec.kernels.attention_cases import output

S = 64


@dataclass(frozen=True, kw_only=True)
class Tree:
    """parents: of each node, -1 for the root, which has position base."""

    base: int
    parents: Sequence[int]

    def path(self, node: int) -> list[int]:
        """From the root to the node."""
        parent = self.parents[node]
        return [*(self.path(parent) if parent >= 0 else ()), node]


def chain(base: int, num_rows: int) -> Tree:
    return Tree(base=base, parents=range(-1, num_rows - 1))


def random_tree(base: int, num_nodes: int, max_depth: int, seed: int = 0) -> Tree:
    rng = random.Random(seed)
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = rng.choice([i for i, depth in enumerate(depths) if depth < max_depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return Tree(base=base, parents=parents)


@dataclass(frozen=True)
class Case:
    """The same queries [T, H, C] over both forms; a row of `plain` is a request of its own."""

    q: Tensor
    cache: Tensor  # [2, N + 1, G, S, C]
    tree: QueryRows
    plain: QueryRows
    node_slots: Tensor  # [T] cache slot of each node's key

    def chains(self) -> QueryRows:
        """Of chains of equal length: the rows of one in one batch slot, over its last blocks."""
        Q = self.tree.max_query_len
        return replace(
            self.plain,
            idx_mapping=torch.arange(Q - 1, len(self.q), Q, device=self.q.device),
            max_query_len=Q,
            tiles=self.tree.tiles,
        )

    def attend(self, how, rows: QueryRows) -> Tensor:
        return output(how, self.q, self.cache, rows)


class _Memory:
    """Blocks in random order, empty ones NaN."""

    def __init__(self, num_blocks: int, G: int, C: int, **how) -> None:
        self.cache = torch.full((2, num_blocks + 1, G, S, C), torch.nan, **how)
        self._free = iter(torch.randperm(num_blocks).tolist())

    def store(self, kv: Tensor) -> list[int]:
        """Blocks that now hold these keys and values [2, length, G, C]."""
        blocks = []
        for part in kv.split(S, dim=1):
            blocks.append(next(self._free))
            self.cache[:, blocks[-1], :, : part.shape[1]] = part.transpose(1, 2)
        return blocks

    def scatter(self, kv: Tensor) -> Tensor:
        """A slot for each, in a block where all else is empty."""
        blocks = torch.tensor([next(self._free) for _ in range(kv.shape[1])])
        offsets = torch.randint(S, (len(blocks),))
        self.cache[:, blocks, :, offsets] = kv.transpose(0, 1)
        return blocks * S + offsets


def tree_case(
    trees: Sequence[Tree],
    *,
    H: int = 4,
    G: int = 2,
    C: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    is_ragged: bool = False,
) -> Case:
    paths = [[tree.path(node) for node in range(len(tree.parents))] for tree in trees]
    T = sum(map(len, paths))
    D1 = max(len(path) for each in paths for path in each)
    M = max(tree.base for tree in trees) // S + 2 + D1 // S
    how = {"dtype": dtype, "device": device}
    memory = _Memory(len(trees) * M + T * (3 + D1 // S), G, C, **how)
    tree_blocks, plain_blocks, slots, node_slots = [], [], [], []
    for tree, own in zip(trees, paths, strict=True):
        shared = torch.randn(2, tree.base, G, C, **how)
        nodes = torch.randn(2, len(own), G, C, **how)
        places = memory.scatter(nodes)
        node_slots.append(places)
        blocks = memory.store(shared)
        tree_blocks.append(blocks)
        whole = tree.base // S
        for path in own:
            tail = torch.cat([shared[:, whole * S :], nodes[:, path]], dim=1)
            plain_blocks.append(blocks[:whole] + memory.store(tail))
            slots.append([*places[path].tolist(), *[-1] * (D1 - len(path))])
    bases = [tree.base for tree in trees]
    depths = [[len(path) - 1 for path in own] for own in paths]
    positions = [base + depth for base, own in zip(bases, depths, strict=True) for depth in own]
    counts = [len(own) for own in paths]

    def on_device(values: object) -> Tensor:
        return torch.as_tensor(values, device=device)

    def table(rows: Sequence[Sequence[int]]) -> Tensor:
        scratch = memory.cache.shape[1] - 1
        return on_device([[*row, *[scratch] * (M - len(row))] for row in [*rows, []]])

    plain = QueryRows(
        block_table=table(plain_blocks),
        idx_mapping=on_device(range(T)),
        positions=on_device(positions),
        max_seq_len=max(positions) + 1,
        tiles=plan_tiles([1] * T, T, torch.device(device)),
    )
    starts = on_device([sum(counts[:b]) for b in range(len(counts) + 1)])
    tree_rows = QueryRows(
        block_table=table(tree_blocks),
        idx_mapping=on_device(range(len(trees))),
        positions=plain.positions,
        query_start_loc=starts if is_ragged else None,
        max_query_len=max(counts),
        max_seq_len=plain.max_seq_len,
        paths=Paths(slots=on_device(slots), starts=on_device(bases)),
        tiles=plan_tiles(counts, T, torch.device(device)),
    )
    q = torch.randn(T, H, C, **how)
    return Case(q, memory.cache, tree_rows, plain, on_device(torch.cat(node_slots)))
