"""Which cache blocks are held, free, or free and still of use. Host only; one pool serves both models' caches.

A block whose contents are known by a key (prefix_keys.py) stays findable when its last holder lets go, until it is
handed out again: blocks that nobody can find go first, then the ones that were let go longest ago.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0..num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._blank = list(
            range(num_blocks - 1, -1, -1)
        )  # free, without a key; the last one goes first
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # free, with a key; the first one goes first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of unknown contents. The caller has checked that they are there."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for blocks that were found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._num_refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go, the last block first: the end of a prefix is of use to fewer than its beginning."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} is freed twice"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the first keys, up to one that nobody knows."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Make a held block findable. Where another block has this key already, that one stays the one to be found."""
        assert self._num_refs[block] > 0, f"block {block} is named while nobody holds it"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Nobody is to find these blocks any more."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
