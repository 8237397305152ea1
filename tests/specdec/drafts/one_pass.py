"""What tests of drafts that propose in one pass share: an engine that is heard, and checks."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.drafts import block
from specdec.drafts.block import BlockDrafter
from specdec.requests.params import GREEDY, SamplingFlags, SamplingStart
from specdec.rounds import propose as propose_module
from specdec.rounds.upload import RowStart
from specdec.runner import Runner
from specdec.scheduling.work import PromptPart
from specdec.sizes import PLAIN, DraftShape, EngineSizes, chain
from tests.naive_block import Block
from tests.naive_eagle import borrow, sampled, target_features
from tests.specdec.tiny_pair import TargetPair
from tests.weights.formats import Format
from weights import LoadedEagle, load_eagle

LONGEST = 256
ROW, BLOCKS = 1, [2, 3, 4, 5]  # neither the first row nor the first blocks
CONTEXTS = (1, 2, 63, 64, 65, 200)
Read = tuple[LoadedEagle, SimpleNamespace, dict[str, Tensor]]


def read_both(directory, format: Format, config, tensors, target: TargetPair, read_draft) -> Read:
    """Write a draft; read it as the engine does, and as the naive reader does."""
    format.write(directory, config, tensors, target.loaded)
    loaded = load_eagle(directory, target.loaded, progress=False)
    assert dataclasses.replace(loaded.config, format="any") == config
    cfg, weights = read_draft(directory, target.loaded.config.num_layers)
    return loaded, cfg, borrow(cfg, weights, target.reference.weights)


def drafts_after(propose: Callable[..., Block], target, cfg, weights, tokens, K, **more) -> Block:
    """What the naive draft proposes after these tokens, of which the target saw all but one."""
    outputs = target.reference.forward(tokens[:-1])
    features = target_features(cfg, outputs.boundaries, outputs.hidden_TD)
    return propose(cfg, weights, tokens, features, K, **more)


class Engine:
    """A runner whose caches start as NaN, and what it hears of its draft, level by level."""

    def __init__(
        self, target, draft, K, monkeypatch, num_reqs=2, longest=LONGEST, rule="exact", **more
    ):
        sizes = EngineSizes(
            max_model_len=longest,
            max_num_seqs=num_reqs,
            max_num_batched_tokens=num_reqs * 256,
            num_kv_blocks=4 * num_reqs,
            num_speculative_tokens=K,
            block_rows=draft.config.block_rows(K),
            **more,
        )
        self.K = K
        self.runner = Runner(target.loaded, draft, sizes, torch.device("cpu"), acceptance=rule)
        for cache in (self.runner.target_cache, self.runner.draft_cache):
            cache.fill_(torch.nan)
        self.logits: list[Tensor] = []
        self.hidden: list[Tensor] = []
        write_level = propose_module.write_level

        def listen(logits_BW, to, noise):
            self.logits.append(logits_BW.clone())
            write_level(logits_BW, to, noise)

        for module in (block, propose_module):  # drafts in turn, and all others
            monkeypatch.setattr(module, "write_level", listen)
        if isinstance(self.runner.draft, BlockDrafter):
            note = lambda model, ids, hidden: self.hidden.append(hidden.clone())  # noqa: E731
            self.runner.draft.model.register_forward_hook(note)

    def start(self, row, blocks, **sampling):
        blocks = blocks[: self.runner.sizes.blocks_per_request]
        start = RowStart(blocks=blocks, num_draft_tokens=self.K, sampling=SamplingStart(**sampling))
        self.runner.start_rows([(row, start)])

    def prefill(
        self, prompts: Sequence[list[int]], rows, blocks, chunk=None, flags=GREEDY, next_shape=None
    ) -> list[int]:
        """Run prompts, one after another's chunks, the last chunks at once; return first tokens."""
        starts = [0] * len(prompts)
        while True:
            self.logits.clear()
            self.hidden.clear()
            parts = []
            for i, prompt in enumerate(prompts):
                length = min(chunk or len(prompt), len(prompt) - starts[i])
                parts.append(
                    PromptPart(
                        state_row=rows[i],
                        prompt=prompt,
                        start=starts[i],
                        length=length,
                        blocks=blocks[i],
                    )
                )
                starts[i] += length
            self.runner.run_step(parts=parts, flags=flags, next_shape=next_shape)
            result = self.runner.read(len(parts))
            if all(start == len(prompt) for start, prompt in zip(starts, prompts, strict=True)):
                return [tokens[0] for tokens in result.sampled_tokens]


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def draw(engine: Engine, temperature: float) -> tuple[list[int], list[int]]:
    """Draft in all rows after one prompt, with a seed each; return the prompt, first tokens."""
    rows, prompt = list(range(engine.runner.sizes.max_num_seqs)), prompt_of(7)
    blocks = blocks_of(rows)
    for row in rows:
        engine.start(row, blocks[row], temperature=temperature, seed=row)
    flags = SamplingFlags(noise=True)
    return prompt, engine.prefill([prompt] * len(rows), rows, blocks, flags=flags)


def blocks_of(rows: Sequence[int]) -> list[list[int]]:
    return [[4 * row + i for i in range(4)] for row in rows]


def check_rows_alone(engine: Engine) -> None:
    """What is drafted for a request depends on no neighbour and no chunk."""
    rows, prompts = list(range(5)), [prompt_of(length) for length in (70, 5, 64, 33, 1)]
    blocks = blocks_of(rows)
    for row in rows:
        engine.start(row, blocks[row])
    engine.prefill(prompts, rows, blocks)
    together = torch.stack(engine.logits, dim=1)
    for chunk in (None, 7):
        engine.start(2, blocks[2])
        engine.prefill([prompts[2]], [2], [blocks[2]], chunk)
        assert torch.equal(torch.stack(engine.logits, dim=1)[0], together[2])


def check_end_of_context(engine: Engine, naive: Callable[..., Block]) -> None:
    """No row is drafted for a position that the context has not. naive: after tokens, K drafts"""
    longest = engine.runner.sizes.max_model_len
    assert longest == 70
    for length in (64, 66, 68, 69):
        engine.start(ROW, BLOCKS)
        [first] = engine.prefill([prompt_of(length)], [ROW], [BLOCKS])
        found = naive([*prompt_of(length), first], engine.K, longest=longest)
        logits_KW = torch.cat(engine.logits)[: len(found.tokens)]
        torch.testing.assert_close(logits_KW, found.logits_KW, atol=2e-5, rtol=0)
        assert engine.runner.state.num_nodes[ROW] == min(engine.K, longest - 1 - length)
        assert engine.runner.draft_cache[:, :, BLOCKS[1], :, 6:].isnan().all()


def check_slots(
    target: TargetPair, make_engine: Callable[[], Engine], shapes: Sequence[DraftShape | None]
) -> None:
    """Slots after the committed tokens may hold anything.

    Those before hold, to the bit, what an extension from scratch writes.

    shapes: what the prompt drafts, then what rounds draft; None: the fixed number
    """
    tokens, engine = prompt_of(58), make_engine()
    engine.start(ROW, BLOCKS)
    tokens += engine.prefill([tokens], [ROW], [BLOCKS], next_shape=shapes[0])
    for turn, (shape, next_shape) in enumerate(itertools.pairwise(shapes)):
        live = engine.K if shape is None else shape.levels
        state = engine.runner.state
        n = int(state.num_computed_tokens[ROW])
        cache = engine.runner.draft_cache[:, :, BLOCKS].transpose(3, 4).flatten(2, 3)
        fresh = make_engine()
        fresh.start(ROW, BLOCKS)
        assert fresh.prefill([tokens[:n]], [ROW], [BLOCKS], next_shape=shape)[0] == tokens[n]
        scratch = fresh.runner.draft_cache[:, :, BLOCKS].transpose(3, 4).flatten(2, 3)
        assert torch.equal(cache[:, :, :n], scratch[:, :, :n])
        drafts, expected = (each.runner.state.draft_tokens[ROW, :live] for each in (engine, fresh))
        assert torch.equal(drafts, expected)
        poisoned = cache.clone()
        poisoned[:, :, n:] = torch.nan
        as_cache = engine.runner.draft_cache[:, :, BLOCKS].transpose(3, 4).shape
        engine.runner.draft_cache[:, :, BLOCKS] = poisoned.view(as_cache).transpose(3, 4)
        # some drafts that hold, then one that does not
        truth, num_held = target.reference.greedy(tokens, 6), min(turn, live)
        wrong = [(truth[num_held] + 1) % 96]
        state.draft_tokens[ROW, :live] = torch.tensor([*truth[:num_held], *5 * wrong][:live])
        how = {"next_shape": next_shape}
        if shape is not None:
            how |= {"shared_rows": 1 + live} if live else {"shape": PLAIN}
        engine.runner.run_step([ROW], max_num_computed=n, **how)
        result = engine.runner.read(1)
        assert result.num_accepted == [num_held]
        tokens += result.sampled_tokens[0][: num_held + 1]


def probabilities(found: Block, temperature: float, factors: np.ndarray) -> list[float]:
    """Path probabilities of drafts, from what the naive draft computed."""
    probs, path = [], 1.0
    for i, score_W in enumerate(found.scores_KW.double()):
        sure = float(((temperature or 1.0) * score_W).softmax(0)[score_W.argmax()])
        if found.confidences:
            sure = (sure * found.confidences[i]) ** 0.5
        sure = min(max(sure, 1e-4), 1 - 1e-4)
        odds = factors[i] * sure / (1 - sure)
        path *= odds / (1 + odds)
        probs.append(path)
    return probs


def check_lengths(
    engine: Engine, naive: Callable[..., Block], lengths: Sequence[int], temperature: float
) -> None:
    """Drafts of a number that varies are the naive ones, and have probabilities; at last none.

    naive: after tokens, K drafts
    """
    factors = np.linspace(0.6, 1.5, 2 * engine.K, dtype=np.float32).reshape(2, engine.K)
    engine.runner.calibrate(factors)
    state, prompt = engine.runner.state, prompt_of(9)
    more = {"scores": sampled(temperature, 7)} if temperature else {}
    flags = SamplingFlags(noise=temperature > 0)
    for length in lengths:
        state.draft_probs.fill_(torch.nan)
        engine.start(ROW, BLOCKS, temperature=temperature, seed=7)
        how = {"flags": flags, "next_shape": chain(length)}
        [first] = engine.prefill([prompt], [ROW], [BLOCKS], **how)
        found = naive([*prompt, first], length, **more)
        assert state.draft_tokens[ROW, :length].tolist() == found.tokens
        assert state.num_nodes[ROW] == length
        expected = probabilities(found, temperature, factors[int(temperature > 0)])
        assert state.draft_probs[ROW, :length].tolist() == pytest.approx(expected, rel=2e-3)
        assert state.draft_probs[ROW, length:].isnan().all()
    engine.prefill([prompt], [ROW], [BLOCKS], next_shape=PLAIN)  # writes context alone
    assert state.num_nodes[ROW] == 0
