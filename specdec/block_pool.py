"""Which cache blocks are free. Host only; one pool serves the target's and the draft's cache."""


class BlockPool:
    """Blocks 0..num_blocks - 1, handed out lowest first and taken back in any order."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. The caller has checked that they are there."""
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_held[block] = True
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back."""
        for block in reversed(blocks):
            assert self._is_held[block], f"block {block} is freed twice"
            self._is_held[block] = False
            self._free.append(block)
