"""A tiny pair, runners over it on any backend, and walks that poison memory before each step."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from graphs.cuda import CudaBackend
from graphs.protocol import GraphBackend
from graphs.tape.backend import TapeBackend
from specdec.config import GraphConfig
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import PLAIN, EngineSizes, TreeShape
from tests.specdec.buffer_tensors import buffer_tensors
from tests.specdec.tiny_pair import changed, lively, random_draft
from tests.weights.blocks import DFLASH2, DSPARK, block_config
from tests.weights.tiny import eagle1_config, eagle3_config, tiny_target
from weights import ExpertsConfig, LoadedEagle, LoadedTarget
from weights.shapes import target_shapes

NUM_REQS, NUM_ROWS = 32, 36  # the last rows of the state are free
BAD = 10**6  # no token, slot, position or row
POISONED_STATE = (
    *("last_sampled_tokens", "num_computed_tokens", "draft_tokens", "num_draft_tokens"),
    *("draft_parents", "num_nodes"),
)


@dataclass(frozen=True)
class Pair:
    target: LoadedTarget
    eagle: LoadedEagle | None
    device: torch.device


def make_backend(name: str) -> tuple[GraphBackend | None, torch.device]:
    """eager, tape or cuda."""
    if name == "cuda":
        return CudaBackend(torch.device("cuda")), torch.device("cuda")
    return (TapeBackend() if name == "tape" else None), torch.device("cpu")


def tiny(draft: str | None, device: torch.device, head_dim: int = 32) -> Pair:
    """Two layers of 64 channels; "eagle3", "eagle1", "peagle", a block's kind or no draft.

    "eagle3, experts": the target has experts.
    """
    plain = tiny_target()
    config = changed(
        plain.config,
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
    )
    if draft is not None and draft.endswith("experts"):
        experts = ExpertsConfig(num=12, per_token=3, width=24, renormalise=True)
        kind = dataclasses.replace(config.layers[0], intermediate_size=0, experts=experts)
        config = dataclasses.replace(config, layers=(config.layers[0], kind))
    target = dataclasses.replace(
        plain, config=config, tensors=_on(device, lively(target_shapes(config)))
    )
    if draft is None:
        return Pair(target, None, device)
    if draft in BLOCKS:
        make, own = block_config, BLOCKS[draft] | {"hidden_size": 64}
    else:
        make = eagle1_config if draft == "eagle1" else eagle3_config
        own = {"num_layers": 2, "mask_token_id": 90} if draft == "peagle" else {}
    sizes = {"intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim}
    taps = {} if draft == "eagle1" else {"aux_boundaries": (0, 1, 2)}
    eagle = random_draft(make(target, **sizes, **taps, **own))
    return Pair(target, dataclasses.replace(eagle, tensors=_on(device, eagle.tensors)), device)


BLOCKS = {"dflash": {}, "dspark": DSPARK | {"markov": "rnn"}, "dflash2": DFLASH2}


def _on(device: torch.device, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def tiny_runner(
    pair: Pair,
    k: int,
    config: GraphConfig | None = None,
    backend: GraphBackend | None = None,
    acceptance: str = "exact",
    tree: TreeShape | None = None,
    confidence_threshold: float = 0.0,
    is_adaptive: bool = False,
) -> Runner:
    """A captured runner of 36 rows and chunks of 48 tokens, whose caches start as NaN."""
    sizes = EngineSizes(
        max_model_len=100,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=48,
        num_kv_blocks=2 * NUM_ROWS,
        num_speculative_tokens=k,
        tree=tree,
        is_adaptive=is_adaptive,
        block_rows=0 if pair.eagle is None else pair.eagle.config.block_rows(k),
    )
    runner = Runner(
        pair.target,
        pair.eagle,
        sizes,
        pair.device,
        graph_config=config,
        backend=backend,
        acceptance=acceptance,
        confidence_threshold=confidence_threshold,
    )
    runner.capture()
    for cache in caches(runner):
        cache[:, :, :-1] = torch.nan
    return runner


def caches(runner: Runner) -> list[Tensor]:
    return (
        [runner.target_cache] if runner.draft is None else [runner.target_cache, runner.draft_cache]
    )


@dataclass
class Walk:
    """One runner on its way; `trace` is all that it computed for real requests, step by step."""

    runner: Runner
    is_poisoned: bool

    def __post_init__(self) -> None:
        self.trace: list[list[Tensor]] = []

    def prefill(self) -> None:
        """32 prompts, 3 to 11 tokens, in chunks of up to 48, cut where the budget ends."""
        runner, chunk, room = self.runner, [], 48
        for row in range(NUM_REQS):
            prompt, blocks, start = prompt_of(row), [2 * row, 2 * row + 1], 0
            runner.start_rows(
                [
                    (
                        row,
                        RowStart(
                            blocks=blocks, num_draft_tokens=runner.sizes.num_speculative_tokens
                        ),
                    )
                ]
            )
            while start < len(prompt):
                length = min(len(prompt) - start, room)
                chunk.append(
                    PromptPart(
                        state_row=row, prompt=prompt, start=start, length=length, blocks=blocks
                    )
                )
                start, room = start + length, room - length
                if room == 0:
                    self._chunk(chunk)
                    chunk, room = [], 48
        self._chunk(chunk)

    def round(self, rows: Sequence[int]) -> None:
        """A round of these rows; a third of them verifies drafts of which two hold."""
        K = self.runner.sizes.path_len - 1
        for row in rows[:: 3 if K else 1000]:
            state = self.runner.state
            drafts, has_trees = state.draft_tokens, self.runner.sizes.tree is not None
            state.num_nodes[row] = drafts.shape[1]
            held = held_tokens(self.runner, row)[:K]
            drafts[row, : len(held)] = torch.tensor(held, device=drafts.device)
            if has_trees:  # all other nodes are beside the first of these
                state.draft_parents[row] = 0
                state.draft_parents[row, len(held) - 1] = len(held) - 1
        self.step(rows)

    def step(self, rows: Sequence[int], **how: object) -> None:
        """A round of what the state holds. how: as in Runner.run_step."""
        K = self.runner.sizes.path_len - 1
        with self._poison(rows):
            self.runner.run_step(rows, max_num_computed=90, **how)
        result = self.runner.read(len(rows))
        most = self.runner.sizes.num_draft_tokens  # fewer where a draft stopped
        most = max([most, *map(len, result.draft_tokens)])  # more where others are chains
        drafts = [[*each, *[-1] * (most - len(each))] for each in result.draft_tokens]
        numbers = [result.sampled_tokens, result.num_accepted, drafts]
        num_rows = how.get("shared_rows") or len(rows) * (K + 1)
        num_seeds = len(rows)
        if how.get("shape") == PLAIN:  # extends the draft's cache, and leaves no streams
            num_rows = num_seeds = 0
        decided = list(range(num_rows))
        found = [torch.tensor(number) for number in numbers]
        self._record(rows, num_rows, decided, num_seeds, found)

    def _chunk(self, parts: Sequence[PromptPart]) -> None:
        rows = [part.state_row for part in parts]
        with self._poison(rows):
            self.runner.run_step(parts=parts)
        sampled = self.runner.read(len(parts)).sampled_tokens
        ended = [
            token for part, (token, *_) in zip(parts, sampled, strict=True) if part.ends_prompt
        ]
        ends = list(itertools.accumulate(part.length for part in parts))
        # that each may be drafted from: a step in which no prompt ends extends the cache alone
        num_seeds = len(parts) if ended else 0
        decided = [end - 1 for end in ends]
        self._record(rows, ends[-1], decided, num_seeds, [torch.tensor(ended)])

    def _record(
        self,
        rows: Sequence[int],
        num_tokens: int,
        decided: Sequence[int],
        num_seeds: int,
        results: list[Tensor],
    ) -> None:
        runner, T = self.runner, num_tokens
        state = [getattr(runner.state, name)[list(rows)] for name in POISONED_STATE]
        filled = runner.buffers
        is_row = filled.slot_mapping[:T] >= 0  # and no padding, as where a draft stopped
        hidden = filled.hidden_states[[row for row in decided if is_row[row]]]
        proposes = filled.sample_mapping[:num_seeds] >= 0
        if runner.sizes.block_rows and not runner.sizes.has_seeds:  # rows are laid out anew
            proposes = proposes & False
        streams = filled.draft_hidden[:num_seeds][proposes]
        buffers = [hidden, filled.aux_hidden_states[:T][is_row], streams]
        assert all(buffer.isfinite().all() for buffer in buffers)
        kept = [cache[:, :, : 2 * NUM_REQS] for cache in caches(runner)]
        self.trace.append(
            [*results, *(tensor.cpu().clone() for tensor in [*state, *buffers, *kept])]
        )

    @contextmanager
    def _poison(self, rows: Sequence[int]) -> Iterator[None]:
        """Before `fill` all that no step may count on, and the float buffers again behind it."""
        if self.is_poisoned:
            poison(self.runner)
        acts = self.runner.acts
        real = acts.forward

        def poisoned(step):
            if self.is_poisoned:
                poison_floats(self.runner)
            real(step)

        acts.forward = poisoned
        try:
            yield
        finally:
            del acts.forward


def poison(runner: Runner) -> None:
    """Buffers, free rows, the scratch row where steps write it, scratch blocks, tile plans."""
    for name, buffer in buffer_tensors(runner.buffers).items():
        if not buffer.is_floating_point() and name not in ("results", "votes"):
            buffer.fill_(BAD)
    poison_floats(runner)
    for name in POISONED_STATE:
        getattr(runner.state, name)[NUM_REQS:] = BAD
    runner.state.block_table[NUM_REQS:-1] = BAD
    for cache in caches(runner):
        # on CUDA nobody writes the scratch block, so it stays what it was
        cache[:, :, -1] = 0.0 if cache.is_cuda else torch.nan
        cache[:, :, 2 * NUM_ROWS : -1] = torch.nan  # nodes of trees, until a step writes them
    for forward in (runner.target, runner.draft):
        tiles = None if forward is None else forward.contexts._tiles
        if tiles is not None:
            tiles._rows.fill_(BAD)
            tiles._reqs.fill_(BAD)


def poison_floats(runner: Runner) -> None:
    for buffer in buffer_tensors(runner.buffers).values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


def prompt_of(row: int) -> list[int]:
    return [(7 * row + 3 * i * i + 5) % 96 for i in range(3 + row % 9)]


def held_tokens(runner: Runner, row: int) -> list[int]:
    """What the target says behind the row's context, twice: the second follows the first."""
    return runner.oracle[row][int(runner.state.num_computed_tokens[row]) + 1 :][:2]


def give_oracle(runner: Runner, pair: Pair) -> None:
    """Plain decoding of every request, for `held_tokens`."""
    plain = Walk(tiny_runner(Pair(pair.target, None, pair.device), 0), is_poisoned=False)
    plain.prefill()
    texts = [[*prompt_of(row)] for row in range(NUM_REQS)]
    first = plain.runner.state.last_sampled_tokens[:NUM_REQS].tolist()
    for row in range(NUM_REQS):
        texts[row].append(first[row])
    for _ in range(40):
        plain.runner.run_step(list(range(NUM_REQS)), max_num_computed=90)
        for row, tokens in enumerate(plain.runner.read(NUM_REQS).sampled_tokens):
            texts[row].append(tokens[0])
    runner.oracle = texts


def assert_same(trace: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Bit for bit, NaN included."""
    assert len(trace) == len(expected)
    for step, (here, there) in enumerate(zip(trace, expected, strict=True)):
        for i, (a, b) in enumerate(zip(here, there, strict=True)):
            assert torch.equal(bits(a), bits(b)), f"step {step}, tensor {i}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32) if tensor.is_floating_point() else tensor
