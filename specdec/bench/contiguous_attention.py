"""Attention by a yardstick inside the engine, in place of `attend`, over keys of its own.

The same job: as many rows and heads, in every layer of the target and the draft, over as many keys
and values as the context has, in the model's dtype, in memory of each layer's own, so that no cache
holds them. Not the same: keys are random and lie in one piece (no paging, no block table), their
number stays that of the context while ours grow with the rounds, and what an engine stores goes to
the paged cache, which is not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphs.context import get_forward_context
from specdec.bench.attention_jobs import Job
from specdec.bench.yardsticks import Attend, Yardstick
from specdec.models.attention import AttentionMetadata


class ContiguousAttention:
    """Call it as `attend`. It has to outlive graphs that captured it: they read its keys.

    A capture would record what is made in it, so keys and masks are made in the warm-up before.
    """

    def __init__(self, yardstick: Yardstick, job: Job) -> None:
        self._yardstick = yardstick
        self._job = job
        self._keys: dict[int, Tensor] = {}  # [L, 2, B, G, context, C] by address of the paged cache
        self._calls: dict[tuple[torch.Size, torch.Size], Attend] = {}  # by shapes of q and k

    def __call__(self, q_THC: Tensor, out_THC: Tensor, layer: int, is_picked: bool) -> None:
        metadata = get_forward_context().attn_metadata
        assert isinstance(metadata, AttentionMetadata), type(metadata)
        rows, *others = metadata.finished if is_picked else metadata.groups
        is_prompt = rows.query_start_loc is not None
        if others or (is_prompt and not self._job.is_prompt):
            out_THC.copy_(q_THC)  # prompts before the rounds, whose time does not count
            return
        B = len(rows.idx_mapping)
        _, H, C = q_THC.shape
        q = q_THC.view(B, -1, H, C).transpose(1, 2)
        k, v = self._keys_of(metadata.layer_caches)[layer, :, :B]
        found = self._call(q, k)(q, k, v).transpose(1, 2).reshape(q_THC.shape)
        # no copy: the next product reads the result where it is
        out_THC.set_(found.untyped_storage(), found.storage_offset(), found.shape, found.stride())

    def _keys_of(self, caches: Sequence[Tensor]) -> Tensor:
        """Make the keys of all layers at once: an engine warms up with some of them.

        caches: of each layer [2, N + 1, G, S, C]
        """
        cache = caches[0]
        address = cache.data_ptr()
        if address not in self._keys:
            _check_no_capture(cache)
            _, _, G, _, C = cache.shape
            shape = (len(caches), 2, self._job.batch, G, self._job.context, C)
            self._keys[address] = torch.randn(shape, dtype=cache.dtype, device=cache.device)
        return self._keys[address]

    def _call(self, q: Tensor, k: Tensor) -> Attend:
        shapes = q.shape, k.shape
        if shapes not in self._calls:
            _check_no_capture(q)
            self._calls[shapes] = self._yardstick(q, k)
        return self._calls[shapes]


def _check_no_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"no warm-up before the capture of {tuple(x.shape)}")
