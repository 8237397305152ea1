"""Which request computes what in the next step. Host only, no tensors.

A fixed rule: prompts first, oldest first, packed into chunks of at most `max_num_batched_tokens`; when none is waiting
for prefill, a round of everything that runs. A request is admitted when a row and all blocks it can ever need are free.
"""

from collections import deque

from specdec.block_pool import BlockPool
from specdec.chunk_inputs import PromptPart
from specdec.kv_cache import BLOCK_SIZE
from specdec.request import Request


class Scheduler:
    """num_spare_tokens: slots that a request needs beyond its last token, for rows that are never accepted."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self.pool = pool
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still needs a step."""
        return bool(self.waiting or self.prefilling or self.running)

    def blocks_needed(self, num_prompt_tokens: int, max_tokens: int, num_speculative_tokens: int) -> int:
        """Blocks for a request's longest possible context and the drafts of its last round."""
        length = min(num_prompt_tokens + max_tokens + num_speculative_tokens, self.max_model_len)
        return -(-length // BLOCK_SIZE)

    def admit(self, num_speculative_tokens: int) -> list[Request]:
        """Move waiting requests that fit into rows, oldest first; returns them."""
        admitted = []
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            need = self.blocks_needed(len(request.prompt_token_ids), request.rules.max_tokens, num_speculative_tokens)
            if need > self.pool.num_free:
                break
            self.waiting.popleft()
            request.row, request.blocks = self._free_rows.pop(), self.pool.allocate(need)
            admitted.append(request)
        self.prefilling += admitted
        return admitted

    def next_chunk(self) -> list[tuple[Request, PromptPart]]:
        """Prompt parts of the next prefill chunk, empty if no prompt is waiting for one."""
        budget, parts = self.max_num_batched_tokens, []
        for request in self.prefilling:
            length = min(len(request.prompt_token_ids) - request.num_prefilled, budget)
            if length == 0:
                break
            budget -= length
            part = PromptPart(
                row=request.row,
                prompt=request.prompt_token_ids,
                start=request.num_prefilled,
                length=length,
                blocks=request.blocks,
                num_logprobs=request.params.prompt_logprobs,
            )
            parts.append((request, part))
        return parts

    def prefilled(self, request: Request, length: int) -> None:
        """Note that a chunk computed `length` more prompt tokens; at the end of the prompt the request runs."""
        request.num_prefilled += length
        if request.num_prefilled == len(request.prompt_token_ids):
            self.prefilling.remove(request)
            self.running.append(request)

    def release(self, request: Request) -> None:
        """Take the row and the blocks of a finished request back."""
        self.running.remove(request)
        self.pool.free(request.blocks)
        self._free_rows.append(request.row)
        request.row, request.blocks = -1, []
