"""Tiny random targets of every family: with drafts or without, tokens are tests/reference.py's."""

import dataclasses
from functools import cache

import pytest
import torch

from specdec import SamplingParams
from specdec.kernels.attention.launch import launch_paged_attention
from specdec.kernels.rotate_and_store import rotate_and_store
from specdec.runner import Runner
from specdec.sizes import EngineSizes
from specdec.start.load import assemble
from tests.specdec.models.written import SilentTokenizer
from tests.specdec.tiny_pair import changed, on_disk, random_draft
from tests.weights.tiny import eagle3_config, tiny_target
from weights import RopeConfig

LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=32)
YARN = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position_embeddings=32)
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
TARGETS = {
    "llama": ("llama", {}),
    "llama, llama3 rope": ("llama", {"rope": LLAMA3}),
    "llama, yarn": ("llama", {"rope": YARN}),
    "llama, linear rope": ("llama", {"rope": RopeConfig(theta=1e4, kind="linear", factor=4.0)}),
    "llama, tied head": ("llama", {"has_tied_head": True}),
    "llama, biases": ("llama", BIASES),
    "llama, odd sizes": (
        "llama",
        {"hidden_size": 30, "intermediate_size": 37, "num_heads": 3, "num_kv_heads": 1},
    ),
    "mistral": ("mistral", {"rope": RopeConfig(theta=1e6)}),
    "qwen2": ("qwen2", {"has_tied_head": True}),
    "qwen2, yarn": ("qwen2", {"rope": YARN}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, heads of 96": ("qwen3", {"head_dim": 96}),
    "qwen3, tied head, yarn": ("qwen3", {"has_tied_head": True, "rope": YARN}),
}
KEYS = {"llama, biases": {"mlp_bias": True}}
PROMPTS = [[50], [7, 61, 13, 88, 2, 40, 40, 5, 19, 73, 31], [(37 * i + 11) % 96 for i in range(70)]]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """target(name): a target, the reference's tokens after PROMPTS, and their least margin."""

    @cache
    def build(name):
        model_type, changes = TARGETS[name]
        pair = on_disk(
            tmp_path_factory.mktemp("target"),
            changed(tiny_target(model_type).config, num_layers=5, **changes),
            seed=2,
            **KEYS.get(name, {}),
        )
        expected = [pair.reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
        return pair.loaded, expected, min(map(margin, [pair.reference] * 3, PROMPTS, expected))

    return build


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "num_drafts, chunk",
    [
        (3, 7),
        pytest.param(0, 512, marks=pytest.mark.slow),
        pytest.param(3, 512, marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_the_reference(target, name, num_drafts, chunk):
    loaded, expected, least_margin = target(name)
    assert least_margin > 1e-4, "a near tie: choose another seed"
    eagle = small_draft(loaded) if num_drafts else None
    assert engine_tokens(loaded, eagle, num_drafts, chunk) == expected


@pytest.mark.slow
def test_attention_of_a_gpu_gives_heads_of_96_the_same_tokens(tmp_path, monkeypatch):
    """Its kernels in Triton's interpreter, under the whole engine."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    config = changed(tiny_target("qwen3").config, num_layers=1, head_dim=96)
    pair = on_disk(tmp_path, config)
    prompt = PROMPTS[1][:6]
    expected = pair.reference.greedy(prompt, 3)
    assert margin(pair.reference, prompt, expected) > 1e-3
    launched = set()

    def pick(tensor, launch, twin):
        launched.add(launch)
        return launch

    def use_triton(tensor):
        launched.add(rotate_and_store)
        return True

    monkeypatch.setattr("specdec.kernels.attention.launch.pick", pick)
    monkeypatch.setattr("specdec.kernels.rotate_and_store.use_triton", use_triton)
    eagle = random_draft(eagle3_config(pair.loaded, aux_boundaries=(0, 1), head_dim=48))
    assert engine_tokens(pair.loaded, eagle, 1, 512, [prompt], 3) == [expected]
    assert launched == {launch_paged_attention, rotate_and_store}


def small_draft(target):
    """Whose heads are half as wide."""
    head_dim = target.config.heads.head_dim // 2
    return random_draft(eagle3_config(target, aux_boundaries=(1, 2, 4), head_dim=head_dim))


@pytest.mark.parametrize(
    "name",
    [
        # of the same kind as another one's
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("qwen2, yarn", "mistral")))
        for name, (_, changes) in TARGETS.items()
        if "rope" in changes
    ],
)
def test_a_rope_that_is_lost_changes_the_tokens(target, name):
    loaded, expected, _ = target(name)
    config = changed(loaded.config, rope=RopeConfig(theta=500.0))
    assert engine_tokens(dataclasses.replace(loaded, config=config), None, 0, 512) != expected


def engine_tokens(target, eagle, num_drafts, chunk, prompts=PROMPTS, num_tokens=NUM_TOKENS):
    """Tokens after the prompts; two run at once, a third waits."""
    sizes = EngineSizes(
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=chunk,
        num_kv_blocks=4,
        num_speculative_tokens=num_drafts,
    )
    runner = Runner(target, eagle, sizes, torch.device("cpu"))
    engine = assemble(runner, target.config, SilentTokenizer(), is_async=False)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = engine.add_requests([(prompt, params) for prompt in prompts])
    while engine.has_unfinished:
        engine.step()
    return [request.token_ids for request in requests]


def margin(reference, prompt, tokens):
    """How far the target is from choosing otherwise, at worst."""
    logits_TV = reference.forward(prompt + tokens[:-1]).logits_TV[len(prompt) - 1 :]
    best_T2 = logits_TV.topk(2).values
    return float((best_T2[:, 0] - best_T2[:, 1]).min())
