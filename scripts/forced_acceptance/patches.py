"""Run engines whose drafts hold at given rates, whatever the weights are.

The draft's head is scaled until its probabilities are as spread as those of a trained one, so that
the planner has as much to go by. Which drafts hold depends on these probabilities (hold.py), so
engines with a fixed number of drafts keep them too, as "auto" does. specdec knows nothing of it:
what must differ is patched here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from unittest.mock import patch

import torch
from torch import Tensor

import weights.load
from scripts.forced_acceptance.hold import hold
from specdec.bench.bench import Bench
from specdec.bench.report import Row
from specdec.bench.serving import Outputs
from specdec.bench.suites import SUITES
from specdec.rounds.state import RequestState
from specdec.rounds.step_sizes import Step
from specdec.runner import Runner
from specdec.step import Acts
from weights.load import LoadedEagle, LoadedTarget

# How often a draft holds if all before it did, by level. Texts differ in how well they can be
# foretold, so that no rates give all lengths: these give 3.19, 4.04 and 4.55 tokens a round at
# K = 3, 5 and 8, where weights/demo_experts accepts 3.21, 4.04 and 4.65, greedily.
RATES = {"demo-experts": (0.87, 0.83, 0.83, 0.8, 0.78, 0.65)}
# Deviation of the draft's logits: its best token has 0.73 of 32,000 and 0.79 of 4,096 tokens, on
# average; the demo's head says 0.72 to 0.80, by level.
SPREAD = 12.0
NUM_DRAWN = 512
MOST = 20.0  # of the logarithm of odds


def rates_of(text: str) -> tuple[float, ...]:
    """Read "demo-experts" or "0.8,0.7"."""
    if text in RATES:
        return RATES[text]
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1 for rate in rates):
        allowed = f"{', '.join(RATES)}, or rates between 0 and 1 with commas"
        raise SystemExit(f"--accept {text}: give {allowed}")
    return rates


def odds_of(rates: Sequence[float], draft_vocab_size: int) -> list[float]:
    """Find the factors f of hold.py with which best children hold at these rates, on average."""
    generator = torch.Generator().manual_seed(0)
    logits_XW = SPREAD * torch.randn(NUM_DRAWN, draft_vocab_size, generator=generator)
    share_X = logits_XW.softmax(dim=-1).amax(dim=-1)
    odds_X = share_X / (1 - share_X).clamp(min=1e-6)
    low, high = torch.full((len(rates),), -MOST), torch.full((len(rates),), MOST)
    for _ in range(40):
        middle = (low + high) / 2
        held = middle.exp()[:, None] * odds_X
        is_high = (held / (1 + held)).mean(dim=1) > torch.tensor(rates)
        low, high = torch.where(is_high, low, middle), torch.where(is_high, middle, high)
    return middle.exp().tolist()


@contextmanager
def forced(rates: Sequence[float], draft_vocab_size: int) -> Iterator[None]:
    """Let drafts hold at these rates in the body, in engines that are made there."""
    factors = odds_of(rates, draft_vocab_size)
    choose = Acts.choose
    read = weights.load.read_tensors
    new_state = Runner._new_state
    loop = SUITES["loop"]

    @cache
    def odds_on(device: torch.device) -> Tensor:
        return torch.tensor(factors, device=device)

    def choose_and_hold(acts: Acts, step: Step) -> None:
        choose(acts, step)
        if step.num_verified > 0 and step.shape.nodes > 0:
            assert not step.is_pq, "p/q has decided"
            V = step.num_padded_verified
            what = acts.buffers, acts.state, V, step.shape, step.shared_rows
            hold(*what, acts.draft.calibration, odds_on(acts.buffers.target_tokens.device))

    def read_scaled(*args: object, **kwargs: object) -> dict[str, Tensor]:
        tensors = read(*args, **kwargs)
        if "fc.weight" in tensors:
            tensors["lm_head.weight"].mul_(SPREAD)
        return tensors

    def new_state_with_probs(
        runner: Runner, target: LoadedTarget, eagle: LoadedEagle | None
    ) -> RequestState:
        runner._has_probs = eagle is not None
        return new_state(runner, target, eagle)

    @wraps(loop)
    def loop_that_says_so(bench: Bench) -> Iterator[Row]:
        shown = "forced: " + " ".join(map(str, rates))
        yield from (row | {"acceptance": shown} for row in loop(bench))

    with (
        patch.object(Acts, "choose", choose_and_hold),
        patch.object(weights.load, "read_tensors", read_scaled),
        patch.object(Runner, "_new_state", new_state_with_probs),
        patch.object(Outputs, "difference", lambda *_: {}),  # each engine has a text of its own
        patch.dict(SUITES, loop=loop_that_says_so),
    ):
        yield
