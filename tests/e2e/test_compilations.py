"""Every kernel that serving needs is compiled at the start."""

import random

import pytest

from specdec import LLM, SamplingParams
from specdec.drafts.eagle import EagleDrafter
from tests.shared_rows import at_random

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_late_compilation")]


def params(rng: random.Random) -> SamplingParams:
    """Any parameters that a request may have."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 20]),
        seed=rng.randrange(100),
        max_tokens=rng.randint(1, 40),
        min_tokens=0,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([None, None, {5: 1.0}]),
        bad_words=rng.choice([None, None, ["def"]]),
        speculate=rng.random() < 0.8,
        ignore_eos=True,
    )


TREE = {"top_k": 4, "num_draft_tokens": 9}
STOPS = {"draft_confidence_threshold": 0.3}


@pytest.mark.parametrize(
    "acceptance, draft, k, more",
    [
        ("exact", "demo", 3, {}),
        ("block", "demo/eagle1", 3, {}),
        ("exact", "demo", "auto", {}),
        ("exact", "demo", 3, STOPS),
        ("exact", "demo", "auto", STOPS),
        ("exact", "demo", 4, TREE | STOPS),
    ],
)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_kernel_is_compiled_while_requests_wait(acceptance, draft, k, more, enforce_eager):
    speculation = {"model": draft, "num_speculative_tokens": k, "acceptance": acceptance}
    speculation |= {"adaptive": k == "auto", **more}
    rng = random.Random(3)
    most = 32 if "top_k" in more else 40
    llm = LLM(
        "demo", speculation, max_num_seqs=most, enforce_eager=enforce_eager, num_kv_blocks=500
    )
    if llm.engine.planner is not None:
        at_random(llm, rng)
    for count, longest in ((1, 5), (3, 1500), (40, 80), (90, 300)):
        prompts = [
            [rng.randrange(3, 4000) for _ in range(rng.randint(1, longest))] for _ in range(count)
        ]
        llm.generate(prompts, [params(rng) for _ in prompts], use_tqdm=False)


@pytest.mark.parametrize("k", [3, "auto"])
def test_no_kernel_is_compiled_for_the_parts_of_a_long_prompt(k, monkeypatch):
    """Steps with a part alone extend the draft's cache, and propose nothing."""
    extend, extended = EagleDrafter._extend_only, []

    def noted(draft, step, how):
        extended.append(step.num_tokens)
        extend(draft, step, how)

    speculation = {"model": "demo", "num_speculative_tokens": k, "adaptive": k == "auto"}
    llm = LLM("demo", speculation, max_num_seqs=4, max_num_batched_tokens=256, num_kv_blocks=100)
    monkeypatch.setattr(EagleDrafter, "_extend_only", noted)
    llm.generate([[7] * 1000], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert extended[:3] == [256] * 3
