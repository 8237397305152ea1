"""One rank of a model that is cut for several GPUs, and what it has of anything that is cut.

Heads, columns of an MLP and experts are cut into equal ranges of neighbours; kv heads that are
fewer than the ranks are copied. Ids are cut at the borders of blocks: sums over a vocabulary are
made block by block, so a block that lay on two ranks would change their order.
"""

from dataclasses import dataclass

MOST_IDS = 4096  # of a block; the blocks and tiles of kernels that read logits divide it
FEWEST_BLOCKS = 8  # of a vocabulary, so that a small one can be cut too


@dataclass(frozen=True, slots=True)
class Shard:
    """This is rank `rank` of `size`, counted from 0."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def range_of(self, count: int) -> range:
        """Find this rank's part of `count` things in order; ranks share one if there are fewer."""
        parts = min(self.size, max(count, 1))
        assert count % parts == self.size % parts == 0, f"{count} things on {self.size} ranks"
        each = count // parts
        first = self.rank * parts // self.size * each
        return range(first, first + each)

    def ids_of(self, vocab_size: int) -> range:
        """Find the ids whose rows of an embedding or a head this rank has."""
        borders = vocabulary_borders(vocab_size, self.size)
        return range(borders[self.rank], borders[self.rank + 1])


WHOLE = Shard(0, 1)


def vocabulary_block(vocab_size: int) -> int:
    """Count the ids of a block: a power of 2, MOST_IDS or what makes FEWEST_BLOCKS of them."""
    ids = max(vocab_size // FEWEST_BLOCKS, 1)
    return min(MOST_IDS, 1 << (ids.bit_length() - 1))


def num_vocabulary_blocks(vocab_size: int) -> int:
    """Count the blocks of a vocabulary; the last may be shorter."""
    return -(-vocab_size // vocabulary_block(vocab_size))


def vocabulary_borders(vocab_size: int, size: int) -> tuple[int, ...]:
    """List the first id of each of `size` ranks, and the end; parts differ by a block at most.

    size: at most num_vocabulary_blocks(vocab_size)
    """
    blocks, ids = num_vocabulary_blocks(vocab_size), vocabulary_block(vocab_size)
    assert size <= blocks, f"{vocab_size} ids are {blocks} blocks, on {size} ranks"
    return tuple(min(blocks * rank // size * ids, vocab_size) for rank in range(size + 1))
