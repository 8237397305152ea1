"""Models, caches and buffers of one engine, and the two kinds of step over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from graphs.manager import MakeForward
from graphs.protocol import GraphBackend
from specdec.config import GraphConfig
from specdec.draft import Draft
from specdec.kernels.paged_attention import workspace_size
from specdec.models.eagle import EagleModel
from specdec.models.kv_cache import BLOCK_SIZE, allocate_kv_cache
from specdec.models.llama import LlamaModel
from specdec.models.rope import rope_tables
from specdec.passes.contexts import PassContexts
from specdec.passes.families import SAMPLED, GraphFamilies
from specdec.requests.needs import GREEDY, Needs
from specdec.sampler.sampler import Choice
from specdec.step import run_chunk, run_round
from specdec.stepping.buffers import BufferSizes, StepBuffers
from specdec.stepping.fill_chunk import PromptPart, fill_chunk
from specdec.stepping.fill_round import fill_round
from specdec.stepping.logprobs import ROWS_AT_ONCE, StepLogprobs, joined, logprobs_of
from specdec.stepping.results import PendingResult, Results, RoundResult
from specdec.stepping.state import RequestState, RowStart
from specdec.stepping.step_sizes import Step
from specdec.stepping.upload import upload
from specdec.target import Target
from weights.load import LoadedEagle, LoadedTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSizes:
    """Resolved sizes of an engine, all in tokens, requests or blocks."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    num_speculative_tokens: int  # K; 0 with or without a draft is plain decoding

    @property
    def query_len(self) -> int:
        """Rows per request of a round, Q = K + 1."""
        return self.num_speculative_tokens + 1

    @property
    def blocks_per_request(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // BLOCK_SIZE)


class Runner:
    """backend: captures the graphs of `graph_config` when `capture` is called; None runs everything eagerly.

    acceptance: the rule for requests that are not greedy. `needs`: see needs.py; the default is that all are greedy.
    """

    def __init__(
        self,
        target: LoadedTarget,
        eagle: LoadedEagle | None,
        sizes: RunnerSizes,
        device: torch.device,
        *,
        graph_config: GraphConfig | None = None,
        backend: GraphBackend | None = None,
        acceptance: str = "exact",
    ) -> None:
        self.sizes, self.device, self.acceptance = sizes, device, acceptance
        dtype = target.tensors["embed_tokens.weight"].dtype
        eagle = eagle if sizes.num_speculative_tokens > 0 else None
        has_scores = eagle is not None and acceptance != "exact"
        self.state = RequestState(
            sizes.max_num_seqs,
            sizes.num_speculative_tokens,
            sizes.blocks_per_request,
            scratch_block=sizes.num_kv_blocks,
            device=device,
            vocab_size=target.config.vocab_size,
            draft_vocab_size=eagle.config.draft_vocab_size if eagle is not None and has_scores else 0,
        )
        self.buffers = StepBuffers(_buffer_sizes(target, eagle, sizes), dtype, device)
        self.results = Results(self.buffers)
        self.graphs = GraphFamilies(
            graph_config or GraphConfig(),
            backend,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            query_len=sizes.query_len,
            has_draft=eagle is not None,
        )
        self._workspace = _workspace(target, eagle, sizes, device)
        taps = eagle.config.aux_boundaries if eagle is not None else ()
        model = build_target(target, taps, sizes.max_model_len, device)
        self.target_cache = allocate_kv_cache(
            target.config.layer, target.config.num_layers, sizes.num_kv_blocks, dtype, device
        )
        self.target = Target(
            model,
            self._contexts(self.target_cache),
            self.buffers,
            self.state,
            self.graphs.target_prefill,
            self.graphs.target_decode,
            self.graphs.target_plain,
            Choice(model, self.buffers, self.state, acceptance, None if eagle is None else eagle.tensors.get("d2t")),
        )
        self.draft: Draft | None = None
        if eagle is not None and self.graphs.draft is not None:
            self.draft_cache = allocate_kv_cache(
                eagle.config.layer, eagle.config.num_layers, sizes.num_kv_blocks, dtype, device
            )
            self.draft = Draft(
                build_draft(eagle, model, sizes.max_model_len, device),
                eagle.tensors.get("d2t"),
                self._contexts(self.draft_cache),
                self.buffers,
                self.state,
                self.graphs.draft,
                acceptance,
            )

    def start(self, row: int, start: RowStart) -> None:
        """Give a request its state row."""
        self.state.assign(row, start)

    def grow(self, grown: Sequence[tuple[int, int, int]]) -> None:
        """Give requests further blocks: (row, place in the block table, cache block) each."""
        self.state.grow(grown)

    def run_chunk(self, parts: Sequence[PromptPart], needs: Needs = GREEDY) -> PendingResult:
        """Launch a prefill chunk; `needs` of the requests whose prompt ends in it."""
        step = self._chunk_step(parts, needs)
        with torch.inference_mode():
            fill_chunk(self.buffers, parts, step.num_padded_reqs, step.num_padded_tokens)
            run_chunk(step, self.target, self.draft, self.buffers, self.state, self.results)
            if any(part.num_logprobs is not None for part in parts):
                self.results.attach(self._logprobs_of(parts))
        return self.results.latest

    def run_round(
        self, rows: Sequence[int], max_num_computed: int, needs: Needs = GREEDY, query_len: int | None = None
    ) -> PendingResult:
        """Launch a round of these request rows; max_num_computed bounds their computed tokens.

        query_len: 1 for a round in which nobody drafts, None for K + 1.
        """
        Q = query_len or self.sizes.query_len
        step = self._round_step(len(rows), max_num_computed, needs, Q)
        padded = np.full(step.num_padded_reqs, -1)
        padded[: len(rows)] = rows
        with torch.inference_mode():
            upload(self.buffers.idx_mapping, padded)
            fill_round(self.buffers, self.state, len(padded), self.sizes.max_model_len, Q)
            self.buffers.pad_rows(len(padded) * Q, step.num_padded_tokens)
            run_round(step, self.target, self.draft, self.buffers, self.state, self.results)
        return self.results.latest

    def read(self, num_reqs: int) -> RoundResult:
        """The latest step's result on the host; waits for the target, not for the draft behind it."""
        result = self.results.latest.read()
        assert len(result.num_accepted) == num_reqs, (len(result.num_accepted), num_reqs)
        return result

    def read_sampled(self, num_reqs: int) -> list[int]:
        """The tokens that the latest chunk sampled, one per batch slot; waits for the target."""
        return [tokens[0] for tokens in self.read(num_reqs).sampled_tokens]

    def capture(self) -> None:
        """Capture the graphs of every family; until then, and without a backend, everything runs eagerly."""
        with torch.inference_mode():
            self.graphs.capture(self._makers())

    def measure(self) -> dict[str, int]:
        """Bytes that the graphs of each family will take, from their largest ones, which are not kept."""
        with torch.inference_mode():
            return self.graphs.measure(self._makers())

    def clear_graphs(self) -> None:
        """Drop all graphs and go on eagerly."""
        self.graphs.clear_all_graphs()

    def _logprobs_of(self, parts: Sequence[PromptPart]) -> list[StepLogprobs | None]:
        """Logprobs of prompt tokens, from the hidden states that the chunk left, some rows at a time."""
        found: list[StepLogprobs | None] = []
        row = 0
        for part in parts:
            following = part.prompt[part.start + 1 : part.start + part.length + 1]
            pieces = []
            for start in range(0, len(following) if part.num_logprobs is not None else 0, ROWS_AT_ONCE):
                tokens = torch.tensor(following[start : start + ROWS_AT_ONCE], device=self.device)
                hidden = self.buffers.hidden_states[row + start : row + start + len(tokens)]
                pieces.append(logprobs_of(self.target.model.logits(hidden), tokens, part.num_logprobs or 0))
            found.append(joined(pieces) if pieces else None)
            row += part.length
        return found

    def _makers(self) -> dict[str, MakeForward]:
        makers: dict[str, MakeForward] = {
            "target_prefill": self.target.make_prefill,
            "target_decode": self.target.make_verify,
        }
        if self.graphs.target_plain is not None:
            makers["target_plain"] = self.target.make_verify
        if self.draft is not None:
            makers |= {"draft_prefill": self.draft.make_prefill, "draft_decode": self.draft.make_decode}
            makers["draft_prefill" + SAMPLED] = partial(self.draft.make_prefill, is_sampled=True)
            makers["draft_decode" + SAMPLED] = partial(self.draft.make_decode, is_sampled=True)
        return makers

    def _contexts(self, kv_cache: Tensor) -> PassContexts:
        return PassContexts(kv_cache, self.buffers, self.state, self.sizes.max_model_len, self._workspace)

    def _chunk_step(self, parts: Sequence[PromptPart], needs: Needs) -> Step:
        lengths = tuple(part.length for part in parts)
        num_sampled = sum(part.ends_prompt for part in parts)
        return Step(
            num_reqs=len(parts),
            num_tokens=sum(lengths),
            query_len=None,
            query_lens=lengths,
            max_seq_len=max(part.start + part.length for part in parts),
            num_sampled=num_sampled,
            passes=self.graphs.dispatch_chunk(len(parts), sum(lengths), num_sampled, needs),
            needs=needs,
        )

    def _round_step(self, num_reqs: int, max_num_computed: int, needs: Needs, Q: int) -> Step:
        return Step(
            num_reqs=num_reqs,
            num_tokens=num_reqs * Q,
            query_len=Q,
            query_lens=(Q,) * num_reqs,
            max_seq_len=min(max_num_computed + Q, self.sizes.max_model_len),
            num_sampled=num_reqs,
            passes=self.graphs.dispatch_round(num_reqs, needs, Q),
            needs=needs,
            is_decided=needs.logits and self.acceptance != "exact",
        )


def build_target(target: LoadedTarget, taps: Sequence[int], max_model_len: int, device: torch.device) -> LlamaModel:
    """The target's module around the loaded tensors."""
    rope = rope_tables(target.config.layer.rope, target.config.layer.head_dim, max_model_len, device)
    with torch.device("meta"):
        model = LlamaModel(target.config, rope, taps)
    tensors = {"lm_head.weight": target.tensors["embed_tokens.weight"]} | target.tensors
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


def build_draft(eagle: LoadedEagle, target: LlamaModel, max_model_len: int, device: torch.device) -> EagleModel:
    """The draft's module around the loaded tensors; what it lacks it borrows from the target."""
    rope = rope_tables(eagle.config.layer.rope, eagle.config.layer.head_dim, max_model_len, device)
    with torch.device("meta"):
        model = EagleModel(eagle.config, rope)
    borrowed: dict[str, Tensor] = {
        "embed_tokens.weight": target.embed_tokens.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    tensors = {name: tensor for name, tensor in (borrowed | eagle.tensors).items() if name != "d2t"}
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


def _workspace(
    target: LoadedTarget, eagle: LoadedEagle | None, sizes: RunnerSizes, device: torch.device
) -> Tensor | None:
    """Where attention keeps its partial results, outside of all graph pools: passes run one after another."""
    if device.type != "cuda":
        return None
    num_rows = sizes.max_num_seqs * sizes.query_len
    layers = [target.config.layer] + ([eagle.config.layer] if eagle is not None else [])
    wanted = [workspace_size(num_rows, layer.num_heads, layer.head_dim, sizes.max_model_len) for layer in layers]
    return torch.empty(max(wanted), dtype=torch.float32, device=device)


def _buffer_sizes(target: LoadedTarget, eagle: LoadedEagle | None, sizes: RunnerSizes) -> BufferSizes:
    taps = len(eagle.config.aux_boundaries) if eagle is not None else 0
    return BufferSizes(
        max_tokens=max(sizes.max_num_batched_tokens, sizes.max_num_seqs * sizes.query_len),
        max_reqs=sizes.max_num_seqs,
        num_speculative_tokens=sizes.num_speculative_tokens,
        hidden_size=target.config.layer.hidden_size,
        aux_width=taps * target.config.layer.hidden_size,
        draft_hidden_size=eagle.config.layer.hidden_size if eagle is not None else 0,
    )
