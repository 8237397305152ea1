"""Cache blocks: which are in use, free, or free with contents worth finding. Host only.

One pool serves both models' caches. A published block (its contents have a key) stays in the index
after its last reference is dropped, until it is reused. Unpublished blocks are reused first, then
published ones, least recently freed first.

Blocks with the same key hold the same keys and values. An entry of the target's cache depends on
the tokens up to its own; an entry of the draft's, for the pair (h_t, x_t+1), also on the token
after it. So a block's key covers all tokens up to the end of the block and one more.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from specdec.requests.request import Request
from specdec.scheduling.work import PromptPart
from specdec.sizes import BLOCK_SIZE, EngineSizes

NO_PREFIX = b""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._free_blank = list(range(num_blocks - 1, -1, -1))  # without a key, reused from the end
        self._free_published: OrderedDict[int, None] = OrderedDict()  # reused from the beginning
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free_blank) + len(self._free_published)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of unknown contents; at least as many must be free."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = [
            self._free_blank.pop() if self._free_blank else self._evict() for _ in range(count)
        ]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block that was found."""
        for block in blocks:
            self._free_published.pop(block, None)
            self._num_refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each, the last first: fewer requests share the end of a prefix."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, f"block {block} is freed twice"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if block in self._key_of:
                    self._free_published[block] = None
                else:
                    self._free_blank.append(block)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Look the keys up in order; return the blocks of those before the first unknown key."""
        found = []
        for key in keys:
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Let a block in use be found by a key. The first block published under a key keeps it."""
        assert self._num_refs[block] > 0, f"block {block} is published while it is free"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def unpublish(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._free_published:
                del self._free_published[block]
                self._free_blank.append(block)

    def _evict(self) -> int:
        block, _ = self._free_published.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block


class RequestBlocks:
    """The blocks of requests: how many one needs, those it takes, and prefixes that are shared.

    use_prefix_cache: start prompts from published blocks, and publish blocks that are whole
    """

    def __init__(self, pool: BlockPool, sizes: EngineSizes, use_prefix_cache: bool) -> None:
        self._pool = pool
        self._sizes = sizes
        self._use_prefix_cache = use_prefix_cache

    def needed(self, request: Request) -> int:
        """Blocks for a request's longest possible context and the drafts of its last round."""
        return _num_blocks(self._max_slots(request))

    def for_round(self, request: Request, num_tokens: int) -> int:
        """Blocks for `num_tokens` tokens, the rows of a round and the drafts for the next one."""
        num_slots = num_tokens + self.num_ahead(request)
        return _num_blocks(min(num_slots, self._max_slots(request)))

    def num_ahead(self, request: Request) -> int:
        """Count slots after its known tokens that a round and the proposal after it may write."""
        K = request.num_speculative_tokens
        return 2 * K + self._sizes.anchor_rows if K else 0

    def _max_slots(self, request: Request) -> int:
        num_tokens = len(request.prompt_token_ids) + request.rules.max_tokens
        return min(num_tokens + request.num_speculative_tokens, self._sizes.max_model_len)

    def take(self, request: Request, count: int) -> list[tuple[int, int, int]]:
        """Give a request further blocks; returns the state updates."""
        first = len(request.blocks)
        blocks = self._pool.allocate(count)
        request.blocks += blocks
        return [(request.state_row, first + i, block) for i, block in enumerate(blocks)]

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the whole cache is too small for a request."""
        need, have = self.needed(request), self._pool.num_blocks
        if need > have:
            raise ValueError(
                "the cache is too small for this request: prompt of "
                f"{len(request.prompt_token_ids)} tokens and max_tokens={request.rules.max_tokens} "
                f"need {need} blocks of 64 tokens, num_kv_blocks={have}: raise num_kv_blocks, or "
                "lower max_tokens"
            )

    def reserve(self, request: Request) -> list[tuple[int, int, int]]:
        """Take all blocks that a running request can ever need; returns the state updates."""
        return self.take(request, self.needed(request) - len(request.blocks))

    def cached(self, request: Request, context: list[int]) -> list[int]:
        """Blocks that hold the beginning of a context; none if logprobs need all of it computed."""
        needs_logprobs = request.params.prompt_logprobs is not None and not request.token_ids
        if not self._use_prefix_cache or needs_logprobs:
            return []
        # at least one token is left to compute
        count = num_whole_blocks(len(context) - bool(request.token_ids))
        self._make_keys(request, count)
        return self._pool.find(request.keys[:count])

    def publish(self, request: Request, part: PromptPart | None) -> None:
        """Publish the blocks that are whole by now. part: of its prompt, else after a round.

        Rounds without drafts for a request may skip the draft's cache, so they do not count.
        """
        if part is not None:
            request.num_valid = part.start + part.length
        elif request.num_speculative_tokens or not self._sizes.num_speculative_tokens:
            request.num_valid = request.num_tokens - 1
        if not self._use_prefix_cache:
            return
        count = min(request.num_valid // BLOCK_SIZE, num_whole_blocks(request.num_tokens))
        if count <= request.num_published:
            return
        self._make_keys(request, count)
        for i in range(request.num_published, count):
            self._pool.publish(request.blocks[i], request.keys[i])
        request.num_published = count

    def _make_keys(self, request: Request, count: int) -> None:
        for i in range(len(request.keys), count):
            before = request.keys[i - 1] if i else NO_PREFIX
            tokens = request.tokens(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE + 1)
            request.keys.append(block_key(before, tokens))


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """before: key of the previous block, or NO_PREFIX. tokens: the block's, and the next token."""
    assert len(tokens) == BLOCK_SIZE + 1, len(tokens)
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def num_whole_blocks(num_tokens: int) -> int:
    """Count the blocks that have a key once the first `num_tokens` tokens are known."""
    return max(num_tokens - 1, 0) // BLOCK_SIZE


def _num_blocks(num_slots: int) -> int:
    return -(-num_slots // BLOCK_SIZE)
