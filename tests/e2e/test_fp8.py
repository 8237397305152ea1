"""Targets in FP8: drafts, neighbours, chunks, caches, graphs and ranks change no token."""

from functools import cache

import pytest
import torch

from scripts import teacher_forced
from scripts.quantise import write
from specdec import LLM, SamplingParams
from specdec.config import GraphConfig
from tests.e2e.ways import WAYS, Way, texts_of
from tests.weights.fp8 import FORMS, ODD_TARGETS, save_odd, write_fp8
from weights import load_target
from weights.demo import demo_directory

QUICK = [("llama", "block", "trees")]
EACH = [(name, form, way) for name in ODD_TARGETS for form in FORMS for way in WAYS]
# as many drafts in each round, whatever steps take while other tests run
FIXED = {"adaptive": False}
TREE = {"model": "demo/eagle1", "num_speculative_tokens": 4, "top_k": 3, "num_draft_tokens": 9}
TREE |= FIXED
CHAIN = {"model": "demo", "num_speculative_tokens": 3} | FIXED
MARGIN = 1.0  # of a token below the maximum in float32 of the plain weights; logits reach 23


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """tiny(name, form): a target whose rows end inside blocks, and its texts one by one."""

    @cache
    def build(name, form):
        directory = tmp_path_factory.mktemp("target")
        save_odd(name, directory / "plain")
        write_fp8(directory / "plain", directory / form, form)
        target = load_target(directory / form, progress=False)
        return target, texts_of(target, Way(num_seqs=1))

    return build


@pytest.mark.parametrize(
    "name, form, way",
    [pytest.param(*each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in EACH],
)
def test_no_token_depends_on_the_way_of_the_engine(tiny, name, form, way):
    target, alone = tiny(name, form)
    assert texts_of(target, WAYS[way]) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_pieces_that_torch_compile_has_made_change_no_token(tiny, name, form):
    target, alone = tiny(name, form)
    pieces = GraphConfig(request_sizes=(6,), token_sizes=(64,), compile_piecewise=True)
    assert texts_of(target, Way(K=3, graphs=pieces, chunk=40, num_seqs=6)) == alone


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """demo(form): the directory of the bundled target in FP8."""

    @cache
    def build(form):
        out = tmp_path_factory.mktemp("demo") / form
        write(demo_directory("target"), out, form)
        return str(out)

    return build


def told(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_give_the_texts_of_one(demo, prompts, greedy, form):
    options = {"max_num_seqs": 4, "max_model_len": 128, "device": "cpu"}
    few, params = [prompt[:60] for prompt in prompts[:4]], greedy(16, logprobs=1)
    expected = told(LLM(demo(form), **options), few, params)
    for draft in (None, CHAIN):
        with LLM(demo(form), draft, **options, tensor_parallel_size=2) as llm:
            assert told(llm, few, params) == expected


def test_ranks_that_would_share_a_block_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    save_odd("llama", tmp_path / "plain")
    write_fp8(tmp_path / "plain", tmp_path / "fp8", "block")
    monkeypatch.setattr("weights.load.read_tensors", None)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=2: num_attention_heads \* head_dim"
    ):
        LLM(str(tmp_path / "fp8"), device="cpu", tensor_parallel_size=2)


# how the demo pair runs on a GPU: its draft, and options of the engine
GPU = {"device": "cuda", "max_model_len": 512, "num_kv_blocks": 400}
PLAIN = (None, {"max_num_seqs": 1})
DRAFTS = (CHAIN, {"max_num_seqs": 48})
WAYS_ON_GPU = {
    "drafts": DRAFTS,
    "trees": (TREE, {"max_num_seqs": 8}),
    "chunks": (None, {"max_num_seqs": 48, "max_num_batched_tokens": 96}),
    "five drafts, one by one": (CHAIN | {"num_speculative_tokens": 5}, {"max_num_seqs": 1}),
    "eager": (CHAIN, {"max_num_seqs": 7, "enforce_eager": True}),
    "as many drafts as pay": (
        {"model": "demo", "num_speculative_tokens": "auto"},
        {"max_num_seqs": 48, "enable_prefix_caching": True},
    ),
}


@pytest.fixture(scope="module")
def on_gpu(demo, prompts, greedy):
    """on_gpu(form, way): the engine, and what it writes after each prompt; "plain": bfloat16."""
    known = {}

    def write_all(form, way):
        draft, options = way
        key = form, repr(way)
        if key not in known:
            llm = LLM("demo" if form == "plain" else demo(form), draft, **GPU, **options)
            known[key] = llm, llm.generate(prompts, greedy(128), use_tqdm=False)
        return known[key]

    return write_all


def tokens_of(outputs):
    return [each.outputs[0].token_ids for each in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS_ON_GPU)
def test_a_gpu_gives_one_set_of_tokens(on_gpu, form, way, no_late_compilation):
    _, alone = on_gpu(form, PLAIN)
    _, outputs = on_gpu(form, WAYS_ON_GPU[way])
    assert tokens_of(outputs) == tokens_of(alone)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_sampled_tokens_of_a_gpu_do_not_depend_on_drafts(on_gpu, prompts, form):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=64, ignore_eos=True)
    engines = [on_gpu(form, way)[0] for way in (PLAIN, DRAFTS)]
    texts = [tokens_of(llm.generate(prompts[:24], params, use_tqdm=False)) for llm in engines]
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_drafts_hold_as_often_as_those_of_the_plain_target(on_gpu, form):
    lengths = []
    for each in ("plain", form):
        llm, outputs = on_gpu(each, DRAFTS)
        lengths.append(llm.run_stats(outputs).mean_acceptance_length)
    print(f"{form}: acceptance length {lengths[1]:.3f}, of bfloat16 {lengths[0]:.3f}")
    assert lengths[1] > 0.97 * lengths[0]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_emitted_tokens_lie_near_the_maximum_of_the_plain_target(on_gpu, prompts, form):
    few = tokens_of(on_gpu(form, DRAFTS)[1])[:24]
    gaps = torch.cat(teacher_forced.forced_gaps("demo", prompts[:24], few))
    below = float((gaps > 0).float().mean())
    print(f"{form}: {below:.2%} of tokens below the maximum, by at most {float(gaps.max()):.3f}")
    assert float(gaps.max()) < MARGIN
