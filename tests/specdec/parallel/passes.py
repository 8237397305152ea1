"""What ranks, or one process with all weights, compute of a tiny pair: one request, pass by pass.

A prompt has more rows than the border between few and many; passes after it have fewer.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from graphs.context import ForwardContext, set_forward_context
from graphs.modes import BatchDescriptor
from graphs.tape.backend import TapeBackend
from graphs.wrapper import capture_graph
from specdec.kernels.attention.query_rows import QueryRows, plan_tiles
from specdec.kernels.linear import linear
from specdec.models.attention import AttentionMetadata
from specdec.models.build import allocate_kv_cache, build_draft, build_target
from specdec.models.decoder import DecoderModel
from specdec.models.eagle import EagleModel
from specdec.sizes import BLOCK_SIZE
from tests.specdec.parallel.reads import exchange_of
from weights import EagleConfig, LoadedEagle, LoadedTarget, Shard, load_eagle, load_target
from weights.shard import WHOLE

CPU = torch.device("cpu")
LONGEST = 64
PASSES = (37, 3, 1)  # rows of each: a prompt, a round, a plain step
PADDING = 2  # rows after them
TOKENS = [(37 * i + 11) % 96 for i in range(sum(PASSES) + 1)]
PICKED = [0, 17, 36]  # rows that a last layer finishes
LEVELS = 2


@dataclass(frozen=True)
class Pair:
    """Where a pair's weights are, and how ranks have the draft."""

    target: Path
    draft: Path | None = None
    is_draft_whole: bool = False
    dtype: torch.dtype = torch.float32

    def load(self, shard: Shard) -> tuple[LoadedTarget, LoadedEagle | None]:
        target = load_target(self.target, shard=shard, dtype=self.dtype, progress=False)
        if self.draft is None:
            return target, None
        of_draft = WHOLE if self.is_draft_whole else None
        # all ranks find a tiny draft's copies to be no copies
        agree = None if shard == WHOLE else bool
        return target, load_eagle(self.draft, target, progress=False, shard=of_draft, agree=agree)


def passes_of(shard: Shard, group: str, pair: Pair, on_tape: bool = False) -> dict[str, Tensor]:
    """Run all passes; logits have the columns of this rank's ids. Shard(0, 1): in one process."""
    target, eagle = pair.load(shard)
    width = target.config.hidden_size
    exchange = None if shard == WHOLE else exchange_of(shard, group, width)
    boundaries = (0, 2, target.config.num_layers) if eagle is None else eagle.config.aux_boundaries
    model = build_target(target, boundaries, LONGEST, CPU, exchange)
    run = _Passes(model, target.local, len(boundaries) * width, on_tape)
    found: dict[str, Tensor] = {}
    features = []
    for i, (first, length) in enumerate(_ranges()):
        hidden_TD, aux_TE = run.target(first, length)
        features.append(aux_TE if boundaries else hidden_TD)
        found |= {f"hidden {i}": hidden_TD, f"features {i}": features[-1]}
        found[f"logits {i}"] = model.logits(hidden_TD)
    found["picked"] = run.picked()
    with model.shortened():
        found["shortened"] = run.picked()
    if eagle is not None:
        draft = build_draft(eagle, model, LONGEST, CPU, exchange)
        chain = _chain(draft, eagle.local, features[0])
        found |= {f"draft {key}": value for key, value in chain.items()}
    return found


def _ranges() -> list[tuple[int, int]]:
    return [(sum(PASSES[:i]), length) for i, length in enumerate(PASSES)]


class _Passes:
    """A target's passes over one request, eagerly or as a graph that is replayed twice."""

    def __init__(self, model: DecoderModel, config: object, aux_width: int, on_tape: bool) -> None:
        self._model = model
        self._aux_width = aux_width
        self._pool = TapeBackend().new_pool() if on_tape else None
        self._caches = _caches(config, len(model.layers), model.norm.weight.dtype)

    def target(self, first: int, length: int) -> tuple[Tensor, Tensor]:
        T = length + PADDING
        context = _context(self._caches, first, length)
        ids_T, aux_TE = _ids(first, length), self._room(T, self._aux_width)
        hidden_TD = self._room(T, self._model.norm.weight.shape[0])

        def forward() -> None:
            hidden_TD.copy_(self._model(ids_T, aux_TE))

        with set_forward_context(context):
            if self._pool is None:
                forward()
            else:
                graph, _ = capture_graph(self._pool, BatchDescriptor(T), forward)
                right = ids_T.clone()
                for ids in (right.flip(0), right):
                    ids_T.copy_(ids)
                    graph.replay()
        return hidden_TD[:length].clone(), aux_TE[:length].clone()

    def _room(self, *shape: int) -> Tensor:
        return self._model.norm.weight.new_full(shape, torch.nan)

    def picked(self) -> Tensor:
        """Run the prompt again; the last layer finishes some of its rows."""
        context = _context(self._caches, 0, PASSES[0], PICKED)
        aux_TE = self._room(PASSES[0] + PADDING, self._aux_width)
        with set_forward_context(context):
            begun = self._model.begin(_ids(0, PASSES[0]), aux_TE)
            return self._model.finish(*begun, rows_X=torch.tensor(PICKED))


def _chain(draft: EagleModel, config: EagleConfig, features_TE: Tensor) -> dict[str, Tensor]:
    """Extend the draft's cache by the prompt, with a seed for its last row; propose levels.

    The cache is [layers, 2, heads of this rank, rows, C].
    """
    T = PASSES[0]
    caches = _caches(config, config.num_layers, features_TE.dtype)
    features_TE = torch.cat([features_TE, torch.zeros(PADDING, features_TE.shape[1])])
    out_BD = torch.full((1, config.layer.hidden_size), torch.nan)
    with set_forward_context(_context(caches, 0, T, [T - 1])):
        g_TD = draft.features(features_TE)
        x, stream_BD = draft(_ids(1, T), g_TD, seeds_B=torch.tensor([T - 1]))
        draft.add(x, stream_BD, out_BD)
    normed_BD, recycled_BD = draft.head_input(out_BD)
    found = {"stream": out_BD, "cache": torch.stack(caches)[:, :, 0, :, :T]}
    for level in range(LEVELS):
        found[f"logits {level}"] = linear(normed_BD, draft.lm_head.weight, out_dtype=torch.float32)
        context = _context(caches, T + level, 1)
        rows_T = torch.zeros(1 + PADDING, dtype=torch.int64)
        with set_forward_context(context):
            ids_T = _ids(T + 1 + level, 1)
            normed_BD, recycled_BD = draft.next_level(ids_T, recycled_BD, rows_T)
        normed_BD, recycled_BD = normed_BD[:1], recycled_BD[:1]
        found[f"recycled {level}"] = recycled_BD
    with set_forward_context(_context(caches, 0, T)):  # all rows finish: many read the end
        found["all rows"], recycled_TD = draft.next_level(_ids(1, T), g_TD)
        found["all recycled"] = recycled_TD
        draft.extend(_ids(1, T), g_TD)
    return {key: value[:T] if key.startswith("all") else value for key, value in found.items()}


def _ids(first: int, length: int) -> Tensor:
    return torch.tensor(TOKENS[first : first + length] + [0] * PADDING)


def _caches(config: object, num_layers: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    blocks = -(-LONGEST // BLOCK_SIZE)
    cache = allocate_kv_cache(config.heads, num_layers, blocks, dtype, CPU)
    return cache.fill_(torch.nan).unbind()


def _context(
    caches: tuple[Tensor, ...], first: int, length: int, picked: list[int] | None = None
) -> ForwardContext:
    """Describe rows of one request from position `first` on, and padding."""
    blocks = len(caches[0][0]) - 1
    table = torch.stack([torch.arange(blocks), torch.full((blocks,), blocks)])
    positions = torch.tensor([*range(first, first + length), *[0] * PADDING])
    slots = torch.tensor([*range(first, first + length), *[-1] * PADDING])
    rows = partial(QueryRows, block_table=table, max_seq_len=first + length)
    group = rows(
        idx_mapping=torch.zeros(1, dtype=torch.int64),
        positions=positions,
        query_start_loc=torch.tensor([0, length]),
        max_query_len=length,
        tiles=plan_tiles([length], len(positions), CPU),
    )
    finished, finished_rows = (), None
    if picked is not None:
        finished_rows = torch.tensor(picked)
        mapping = torch.zeros(len(picked), dtype=torch.int64)
        finished = (rows(idx_mapping=mapping, positions=positions[finished_rows]),)
    metadata = AttentionMetadata(
        layer_caches=caches,
        slot_mapping=slots,
        positions=positions,
        groups=(group,),
        finished_rows=finished_rows,
        finished=finished,
    )
    return ForwardContext(attn_metadata=metadata, slot_mapping=slots, num_tokens=len(slots))
