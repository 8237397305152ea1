"""Models, caches and buffers of one engine, and the two kinds of step over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.buffers import BufferSizes, StepBuffers
from specdec.chunk_inputs import PromptPart, chunk_step, fill_chunk
from specdec.draft import Draft
from specdec.kernels.target_inputs import fill_round
from specdec.kv_cache import BLOCK_SIZE, allocate_kv_cache
from specdec.models.eagle import EagleModel
from specdec.models.llama import LlamaModel
from specdec.models.rope import rope_tables
from specdec.round import run_chunk, run_round
from specdec.state import RequestState, RowStart
from specdec.step import Step
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


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a step decided, on the host. Lists are per batch slot of the step."""

    sampled_tokens: list[list[int]]  # K + 1 each; num_accepted + 1 of them count
    num_accepted: list[int]
    draft_tokens: list[list[int]]  # what was verified


class Runner:
    def __init__(
        self, target: LoadedTarget, eagle: LoadedEagle | None, sizes: RunnerSizes, device: torch.device
    ) -> None:
        self.sizes, self.device = sizes, device
        dtype = target.tensors["embed_tokens.weight"].dtype
        has_draft = eagle is not None and sizes.num_speculative_tokens > 0
        taps = eagle.config.aux_boundaries if eagle is not None and has_draft else ()
        self.state = RequestState(
            sizes.max_num_seqs,
            sizes.num_speculative_tokens,
            sizes.blocks_per_request,
            scratch_block=sizes.num_kv_blocks,
            device=device,
        )
        self.buffers = StepBuffers(_buffer_sizes(target, eagle if has_draft else None, sizes), dtype, device)

        model = build_target(target, taps, sizes.max_model_len, device)
        self.target_cache = allocate_kv_cache(
            target.config.layer, target.config.num_layers, sizes.num_kv_blocks, dtype, device
        )
        self.target = Target(model, self.target_cache, self.buffers, self.state)
        self.draft: Draft | None = None
        if eagle is not None and has_draft:
            self.draft_cache = allocate_kv_cache(
                eagle.config.layer, eagle.config.num_layers, sizes.num_kv_blocks, dtype, device
            )
            self.draft = Draft(
                build_draft(eagle, model, sizes.max_model_len, device),
                eagle.tensors.get("d2t"),
                self.draft_cache,
                self.buffers,
                self.state,
                sizes.max_model_len,
            )

    def start(self, row: int, start: RowStart) -> None:
        """Give a request its state row."""
        self.state.assign(row, start)

    def run_chunk(self, parts: Sequence[PromptPart]) -> None:
        """Run a prefill chunk."""
        step = chunk_step(parts)
        fill_chunk(self.buffers, parts, step.num_reqs, step.num_tokens)
        with torch.inference_mode():
            run_chunk(step, self.target, self.draft, self.buffers, self.state)

    def run_round(self, rows: Sequence[int], max_num_computed: int) -> None:
        """Run a round of these request rows; max_num_computed bounds their computed tokens."""
        B, Q = len(rows), self.sizes.query_len
        step = Step(
            num_reqs=B,
            num_tokens=B * Q,
            query_len=Q,
            max_seq_len=min(max_num_computed + Q, self.sizes.max_model_len),
            num_sampled=B,
        )
        self.buffers.idx_mapping[:B].copy_(torch.tensor(rows, dtype=torch.int64), non_blocking=True)
        with torch.inference_mode():
            fill_round(self.buffers, self.state, B, self.sizes.max_model_len)
            run_round(step, self.target, self.draft, self.buffers, self.state)

    def read(self, num_reqs: int) -> RoundResult:
        """Bring a round's result to the host; waits for the device."""
        B, Q = num_reqs, self.sizes.query_len
        ids_BQ = self.buffers.input_ids[: B * Q].view(B, Q)
        return RoundResult(
            self.buffers.sampled_tokens[:B].tolist(), self.buffers.num_accepted[:B].tolist(), ids_BQ[:, 1:].tolist()
        )

    def read_sampled(self, num_reqs: int) -> list[int]:
        """Bring the tokens that a chunk sampled to the host, one per batch slot; waits for the device."""
        tokens: list[int] = self.buffers.sampled_tokens[:num_reqs, 0].tolist()
        return tokens


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
