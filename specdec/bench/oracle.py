"""Drafts that hold as often as is asked: plain decoding's own tokens, spoiled.

The draft runs as it always does. After it, what it proposed is replaced on the device, so a round
takes as long as with its own proposals, but for a few small launches, and outputs stay those of the
target. For each position of a prompt's text one number u is drawn, uniform in [0, 1). In a round
that begins there draft i holds if u is below the i-th rate, so that the first i drafts hold with
this probability. Neither the batch nor K nor other rounds have a say in it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec.bench.timing import Method, wrapped
from specdec.engine import Engine
from specdec.rounds.step_sizes import Step
from specdec.rounds.upload import RowStart, upload

Texts = Mapping[tuple[int, ...], Sequence[int]]  # what follows each prompt


def spoiled(
    prompt: Sequence[int], text: Sequence[int], rates: Sequence[float], vocab_size: int, seed: int
) -> Tensor:
    """Make the drafts of a round by its last sampled token's position, int64 [P, K].

    text: what follows the prompt; the last K tokens have no row
    rates: K probabilities that the first i drafts hold, none above the one before it
    """
    chance = random.Random(str((seed, *prompt)))
    drafts_PK = torch.tensor([*prompt, *text])[1:].unfold(0, len(rates), 1)
    draws_P1 = torch.tensor([[chance.random()] for _ in drafts_PK], dtype=torch.float64)
    holds_PK = draws_P1 < torch.tensor(rates, dtype=torch.float64)
    return torch.where(holds_PK, drafts_PK, (drafts_PK + 1) % vocab_size)


@contextmanager
def oracle(engine: Engine, texts: Texts, rates: Sequence[float], seed: int) -> Iterator[None]:
    """Let the drafts of an engine of chains hold at these rates while the body runs.

    texts: of every prompt that is served, each at least K tokens longer than its answers
    rates: for each of the K drafts, see spoiled
    """
    runner, scheduler = engine.runner, engine.scheduler
    state, sample_mapping = runner.state, runner.buffers.sample_mapping
    V = state.sampling.vocab_size
    made = {prompt: spoiled(prompt, text, rates, V, seed) for prompt, text in texts.items()}
    R, P, K = len(state.draft_tokens), max(map(len, made.values())), len(rates)
    drafts_RPK = torch.zeros(R, P, K, dtype=torch.int64, device=runner.device)

    def and_upload(start_rows: Method) -> Method:
        def start(
            starts: Sequence[tuple[int, RowStart]] = (), grown: Sequence[tuple[int, int, int]] = ()
        ) -> None:
            start_rows(starts, grown)
            admitted = (*scheduler.prefilling, *scheduler.running)
            prompts = {each.state_row: tuple(each.prompt_token_ids) for each in admitted}
            for row, _ in starts:
                upload(drafts_RPK[row], made[prompts[row]])

        return start

    def and_replace(decode_draft: Method) -> Method:
        def decode(step: Step) -> None:
            decode_draft(step)
            row_B = sample_mapping[: step.num_reqs]  # -1, padding: the scratch row
            # steps that run ahead may begin after a text's end
            at_B = state.num_computed_tokens[row_B].clamp(max=P - 1)
            state.draft_tokens[row_B] = drafts_RPK[row_B, at_B]

        return decode

    with (
        wrapped(runner, ["start_rows"], lambda _: and_upload),
        wrapped(runner.acts, ["decode_draft"], lambda _: and_replace),
    ):
        yield
