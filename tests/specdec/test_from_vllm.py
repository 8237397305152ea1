"""A script for vLLM: its import paths and arguments are taken, or refused with what to do."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import specdec
import specdec.outputs
import specdec.sampling_params
from specdec import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, SpeculativeConfig
from specdec.config import EngineConfig
from specdec.from_vllm import ENGINE, SAMPLING, SPECULATION

TAKEN = {
    "load_format": ("auto",),
    "task": ("generate", "auto"),
    "distributed_executor_backend": (None, "mp"),
    "block_size": (64, None),
}


def test_the_import_paths_of_vllm_give_the_same_classes():
    assert specdec.sampling_params.SamplingParams is SamplingParams
    for name in specdec.sampling_params.__all__:
        assert getattr(specdec.sampling_params, name) is getattr(specdec, name)
    assert {"CompletionOutput", "RequestOutput"} == set(specdec.outputs.__all__)
    for name in specdec.outputs.__all__:
        assert getattr(specdec.outputs, name) is getattr(specdec, name)


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(specdec.__file__).with_suffix(".pyi").read_text())
    names = [alias.asname for node in tree.body for alias in getattr(node, "names", [])]
    assert sorted(names) == sorted(specdec.__all__)


@pytest.mark.parametrize("name", TAKEN)
def test_values_that_describe_specdec_are_taken_and_others_refused_by_name(name):
    for value in TAKEN[name]:
        assert getattr(EngineConfig(**{name: value}), name) == value
    with pytest.raises(ValueError, match=f"^{name}='ray': only {TAKEN[name][0]!r}.* possible, "):
        EngineConfig(**{name: "ray"})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"enable_lora": True}, "does not take enable_lora: .*merge the adapter into the target"),
        ({"limit_mm_per_prompt": {"image": 1}}, "does not take limit_mm_per_prompt: .*are text"),
        ({"speculative_model": "[ngram]"}, "take speculative_model: give speculative_config="),
        ({"ngram_prompt_lookup_max": 4}, "take ngram_prompt_lookup_max: .*an EAGLE draft"),
        ({"num_gpu_blocks_override": 9}, "take num_gpu_blocks_override: give num_kv_blocks"),
        ({"compilation_config": 3}, "take compilation_config: .*enforce_eager=True"),
    ],
)
@pytest.mark.parametrize("owner", [LLM, AsyncLLM, AsyncEngineArgs])
def test_what_an_engine_cannot_do_is_refused_in_its_own_words(owner, options, words):
    with pytest.raises(ValueError, match=words) as refused:
        owner("demo", **options)
    assert "allowed:" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_names_with_one_answer_share_it_and_the_rest_is_said_too():
    with pytest.raises(ValueError, match="max_lora_rank") as refused:
        LLM("demo", enable_lora=True, max_lora_rank=8, max_model_lne=9)
    advice = "LoRA is not supported: merge the adapter into the target's weights"
    assert str(refused.value) == (
        "LLM does not take max_model_lne; did you mean max_model_len?; nor enable_lora, "
        f"max_lora_rank: {advice}"
    )


@pytest.mark.parametrize(
    "given, words",
    [
        ({"method": "ngram", "prompt_lookup_max": 4}, "take prompt_lookup_max: n-gram drafts"),
        (
            {"method": "ngram", "num_speculative_tokens": 4},
            "^method='ngram': .* EAGLE, P-EAGLE, DFlash and DSpark heads",
        ),
        (
            {"method": "medusa", "model": "a/b"},
            "^method='medusa': .* EAGLE, P-EAGLE, DFlash and DSpark heads",
        ),
        ({"model": "demo", "speculative_token_tree": "[]"}, "tree: give top_k= and num_draft_"),
    ],
)
def test_drafts_of_other_kinds_are_refused_in_their_own_words(given, words):
    with pytest.raises(ValueError, match=words) as refused:
        LLM("demo", speculative_config=given)
    assert "allowed:" not in str(refused.value)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"best_of": 2}, "SamplingParams does not take best_of: give n="),
        ({"use_beam_search": True}, "beam search"),
        ({"guided_decoding": None}, "take guided_decoding: give structured_outputs="),
        ({"logits_processors": []}, "take logits_processors: .*logit_bias"),
    ],
)
def test_what_a_request_cannot_do_is_refused_in_its_own_words(given, words):
    with pytest.raises(ValueError, match=words) as refused:
        SamplingParams(**given)
    assert "allowed:" not in str(refused.value)


@pytest.mark.parametrize(
    "advice, owner",
    [(ENGINE, EngineConfig), (SPECULATION, SpeculativeConfig), (SAMPLING, SamplingParams)],
)
def test_advice_is_one_short_sentence_about_what_is_not_taken(advice, owner):
    assert not advice.keys() & {field.name for field in fields(owner)}
    for text in advice.values():
        assert len(text) <= 120
        assert text[-1] != "."


def test_arguments_collected_for_an_engine_are_those_of_the_engine():
    args = AsyncEngineArgs("demo", {"model": "demo"}, max_model_len=64, block_size=64)
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("demo", 64, 64)
    with pytest.raises(FrozenInstanceError):
        args.max_model_len = 32
    assert list(inspect.signature(AsyncEngineArgs).parameters)[:2] == [
        "model",
        "speculative_config",
    ]
    with pytest.raises(ValueError, match="AsyncEngineArgs does not take max_model_lne; did you"):
        AsyncEngineArgs("demo", max_model_lne=64)
    with pytest.raises(ValueError, match="num_speculative_tokens='x'"):
        AsyncEngineArgs("demo", {"model": "demo", "num_speculative_tokens": "x"})
    with pytest.raises(ValueError, match=r"^model=5: give a directory"):
        AsyncEngineArgs(model=5)


def test_an_asynchronous_engine_is_built_from_collected_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(AsyncLLM, "__init__", lambda self, *args, **how: seen.append((args, how)))
    args = AsyncEngineArgs("demo", {"model": "demo"}, max_model_len=64)
    assert isinstance(AsyncLLM.from_engine_args(args), AsyncLLM)
    [(given, options)] = seen
    assert given == ("demo", SpeculativeConfig("demo"))
    assert EngineConfig(**options) == EngineConfig(max_model_len=64)
    with pytest.raises(ValueError, match="engine_args='demo': give AsyncEngineArgs"):
        AsyncLLM.from_engine_args("demo")
