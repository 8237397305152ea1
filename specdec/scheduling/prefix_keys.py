"""Keys of the contents of cache blocks: blocks with the same key hold the same keys and values.

An entry of the target's cache depends on the tokens up to its own. An entry of the draft's, for the
pair (h_t, x_t+1), also depends on the token after it. So a block's key covers all tokens up to the
end of the block and one more.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from specdec.sizes import BLOCK_SIZE

NO_PREFIX = b""


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """before: key of the previous block, or NO_PREFIX. tokens: the block's, and the next token."""
    assert len(tokens) == BLOCK_SIZE + 1, len(tokens)
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def num_whole_blocks(num_tokens: int) -> int:
    """How many blocks have a key once the first `num_tokens` tokens are known."""
    return max(num_tokens - 1, 0) // BLOCK_SIZE
