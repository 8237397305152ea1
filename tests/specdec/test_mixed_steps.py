"""A step with verify slots and prompts equals the two steps that it replaces, to the bit."""

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec.config import GraphConfig
from specdec.requests.row_start import RowStart, SamplingStart
from specdec.requests.sampling_flags import GREEDY, SamplingFlags
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from tests.specdec.graph_walk import (
    Pair,
    caches,
    make_backend,
    poison,
    prompt_of,
    tiny,
    tiny_runner,
)

SIZES = {"request_sizes": (4, 8), "token_sizes": (16, 48)}
DRAWN = SamplingFlags(noise=True, floor=True)
RUNNING = [0, 1, 2, 3, 4]
STATE = ("last_sampled_tokens", "num_computed_tokens", "draft_tokens")


def part(row: int, start: int, length: int) -> PromptPart:
    """Of a prompt of 3 to 11 tokens."""
    return PromptPart(
        state_row=row,
        prompt=prompt_of(row),
        start=start,
        length=length,
        blocks=[2 * row, 2 * row + 1],
    )


def running(pair: Pair, k: int, config: GraphConfig, backend: str) -> Runner:
    """Five requests whose prompts are computed, and one round behind them."""
    runner = tiny_runner(pair, k, config, make_backend(backend)[0])
    for row in range(9):
        sampling = SamplingStart(prompt=prompt_of(row), temperature=0.9, top_p=0.9, seed=row)
        blocks = [2 * row, 2 * row + 1]
        runner.start(row, RowStart(blocks=blocks, num_draft_tokens=k, sampling=sampling))
    runner.run_step(parts=[part(row, 0, len(prompt_of(row))) for row in RUNNING])
    runner.run_step(RUNNING, max_num_computed=20)
    return runner


# prompts that end, one that goes on, and one that went on before
PARTS = [part(5, 0, 8), part(6, 0, 9), part(7, 0, 4)]
AFTER = [part(7, 4, 6)]


@pytest.mark.parametrize("backend", ["eager", "tape", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("flags", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft, k", [("eagle3", 3), ("eagle1", 1), (None, 0)])
@pytest.mark.parametrize("query_len", [None, 1])
def test_a_mixed_step_equals_the_two_that_it_replaces(backend, flags, draft, k, query_len):
    pair = tiny(draft, make_backend(backend)[1])
    config = GraphConfig(**SIZES)
    apart, mixed = (running(pair, k, config, backend) for _ in range(2))
    Q = query_len or k + 1
    before = mixed.graphs.target.prefill.counters.replays[CUDAGraphMode.PIECEWISE]
    for num_mixed, parts in enumerate((PARTS, AFTER), 1):
        apart.run_step(RUNNING, max_num_computed=60, flags=flags, query_len=query_len)
        verified = apart.read(5)
        hidden = [apart.buffers.hidden_states[: 5 * Q].clone()]
        apart.run_step(parts=parts, flags=flags)
        first = apart.read(len(parts))
        hidden.append(apart.buffers.hidden_states[: sum(each.length for each in parts)].clone())

        poison(mixed)
        mixed.run_step(RUNNING, parts, max_num_computed=60, flags=flags, query_len=query_len)
        found = mixed.read(5 + len(parts))

        assert found.num_accepted[:5] == verified.num_accepted
        assert [row[:Q] for row in found.sampled_tokens[:5]] == [
            row[:Q] for row in verified.sampled_tokens
        ]
        assert found.draft_tokens[:5] == verified.draft_tokens
        ends = [b for b, each in enumerate(parts) if each.ends_prompt]
        assert [found.sampled_tokens[5 + b][0] for b in ends] == [
            first.sampled_tokens[b][0] for b in ends
        ]
        together = torch.cat(hidden)
        assert torch.equal(mixed.buffers.hidden_states[: len(together)], together)
        for i, (ours, theirs) in enumerate(zip(caches(mixed), caches(apart), strict=True)):
            # a round that drafts nothing leaves the draft's cache alone; with prompts it does not
            blocks = slice(10 if i == 1 and Q == 1 else 0, 16)
            kept = [cache[:, :, blocks].nan_to_num(9e9) for cache in (ours, theirs)]
            assert torch.equal(*kept)
        started = [*RUNNING, *(parts[b].state_row for b in ends)]
        replays = mixed.graphs.target.prefill.counters.replays[CUDAGraphMode.PIECEWISE]
        assert replays - before == (0 if backend == "eager" else num_mixed)
        for name in STATE:
            if name != "draft_tokens" or Q > 1 or k == 0:
                ours, theirs = (getattr(each.state, name)[started] for each in (mixed, apart))
                assert torch.equal(ours, theirs), name
