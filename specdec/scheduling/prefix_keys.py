"""Names for the contents of cache blocks: two blocks with one key hold the same keys and values, bit for bit.

An entry of the target's cache depends on the tokens up to its own. One of the draft's, for the pair (h_t, x_t+1),
depends on the token behind it too. So a block's key covers all tokens before its end and one more.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from specdec.sizes import BLOCK_SIZE

NO_PREFIX = b""


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """before: key of the block before it, NO_PREFIX for the first. tokens: its own and the one behind them."""
    assert len(tokens) == BLOCK_SIZE + 1, len(tokens)
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def num_whole_blocks(num_tokens: int) -> int:
    """Blocks that have a key when so many tokens are known."""
    return max(num_tokens - 1, 0) // BLOCK_SIZE
