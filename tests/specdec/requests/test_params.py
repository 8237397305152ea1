"""Parameters are checked when they are made; what does not exist yet is refused by name."""

import json

import numpy as np
import pytest

from specdec import SamplingParams
from specdec.requests.params import recommended_params
from weights.errors import CheckpointError


def test_names_and_defaults_are_those_of_vllm():
    params = SamplingParams(temperature=0.0)
    assert (params.max_tokens, params.min_tokens, params.stop_strings) == (256, 0, ())
    assert (params.stop_token_ids, params.detokenize) == (None, True)
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (
        False,
        True,
        False,
    )
    assert SamplingParams(temperature=0.0, max_new_tokens=7).max_tokens == 7


@pytest.mark.parametrize("stop, strings", [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ())])
def test_stop_is_a_string_or_several(stop, strings):
    assert SamplingParams(temperature=0.0, stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    "values, words",
    [
        ({"temperature": -0.7}, "temperature=-0.7: give 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_tokens": 0}, "max_tokens=0: give an integer of at least 1"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
        ({"max_tokens": True}, "max_tokens=True"),
        (
            {"max_tokens": 4, "min_tokens": 5},
            "min_tokens=5: give an integer from 0 to max_tokens=4",
        ),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"stop": ["a", ""]}, "give non-empty strings"),
        ({"stop": [3]}, "give non-empty strings"),
        ({"stop_token_ids": [-1]}, "give token ids"),
        ({"stop_token_ids": ["1"]}, "give token ids"),
        ({"top_p": 0}, "top_p=0: give a number above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"seed": 1.0}, "seed=1.0: give an integer, or None"),
        ({"seed": True}, "seed=True"),
        ({"n": 0}, "n=0: give an integer from 1 to 1024"),
        ({"n": 1025}, "n=1025: give an integer from 1 to 1024"),
        ({"n": 2}, "n=2 with temperature=0"),
        ({"logprobs": 21}, "logprobs=21: give an integer from 0 to 20"),
        ({"prompt_logprobs": -2}, "prompt_logprobs=-2"),
        ({"stop": "a", "detokenize": False}, "stop='a' with detokenize=False"),
        ({"detokenize": 1}, "detokenize=1: give True or False"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300: give a number from 1e-06"),
        ({"logit_bias": {1: 200.0}}, "logit_bias"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"bad_words": "word"}, "bad_words='word': give a list"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids=.*at least one"),
        ({"stop": 5}, "stop=5: give a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: give a list of token ids"),
        ({"stop_token_ids": iter([5])}, "stop_token_ids=.*: give a list of token ids"),
        ({"bad_words": 5}, "bad_words=5: give a list"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5: give a list of token ids, or None"),
        ({"ignore_eos": "no"}, "ignore_eos='no': give True or False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens=0: give True or False"),
        (
            {"include_stop_str_in_output": None},
            "include_stop_str_in_output=None: give True or False",
        ),
        ({"speculate": 1}, "speculate=1: give True or False"),
        ({"top_n": 2}, "SamplingParams does not take top_n"),
        ({"stop_tokens": [1]}, "did you mean stop_token_ids"),
    ],
)
def test_invalid_values_are_refused_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**({"temperature": 0.0} | values if values else {}))


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 1.0},
        {"top_k": -1},
        {"n": 1},
        {"seed": None},
        {"seed": -1},
        {"repetition_penalty": 1},
    ],
)
def test_values_that_change_nothing_are_taken(values):
    assert SamplingParams(temperature=0.0, **values) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "given, used",
    [(-2, 2**64 - 2), (-(2**63), 2**63), (2**64, 0), (2**64 + 5, 5), (-(2**64), 0), (7, 7)],
)
def test_any_seed_is_taken_modulo_the_number_of_seeds(given, used):
    assert SamplingParams(seed=given).seed == used


def test_positional_arguments_are_in_the_order_of_vllm():
    params = SamplingParams(2, 0.5, 0.25, 1.5, 0.75, 0.5, 40, 0.125, 7, "a", [3], True, 9, 1, 5, 4)
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.5, 0.25)
    assert (params.repetition_penalty, params.temperature, params.top_p) == (1.5, 0.75, 0.5)
    assert (params.top_k, params.min_p, params.seed, params.stop) == (40, 0.125, 7, "a")
    assert (params.stop_token_ids, params.ignore_eos, params.max_tokens) == ([3], True, 9)
    assert (params.min_tokens, params.logprobs, params.prompt_logprobs) == (1, 5, 4)


def test_a_temperature_below_a_hundredth_is_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    assert caplog.messages == ["temperature=1e-05 is raised to 0.01 (0 is greedy)"]


def test_numbers_of_numpy_become_those_of_python():
    params = SamplingParams(
        temperature=np.float32(0.5),
        seed=np.int64(3),
        stop_token_ids=[np.int32(4)],
        logit_bias={np.int64(5): np.float64(1)},
    )
    values = [params.temperature, params.seed, *params.stop_token_ids, *params.logit_bias.items()]
    assert values == [0.5, 3, 4, (5, 1.0)]
    assert [type(value) for value in values[:3]] == [float, int, int]
    assert [type(value) for value in values[3]] == [int, float]


def test_a_clone_is_checked_and_independent():
    params = SamplingParams(temperature=0.5, max_new_tokens=9, stop=["a"])
    clone = params.clone()
    assert clone == params
    clone.max_tokens = 3
    assert params.max_tokens == 9
    clone.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens=0"):
        clone.clone()


def test_no_attribute_is_added_by_a_misspelt_name():
    with pytest.raises(AttributeError):
        SamplingParams(temperature=0.0).max_token = 3


def test_known_fields_of_a_checkpoints_recommendation_are_read_and_others_are_not(tmp_path):
    assert recommended_params(tmp_path) == SamplingParams()
    given = {"temperature": 0.5, "max_new_tokens": 9, "do_sample": True, "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert recommended_params(tmp_path) == SamplingParams(temperature=0.5, max_tokens=9)


@pytest.mark.parametrize("text", ['{"top_p": 5}', '{"temperature": "hot"}', "[]"])
def test_what_is_invalid_is_an_error_of_the_checkpoint(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        recommended_params(tmp_path)
    assert error.value.directory == tmp_path
    assert error.value.problems[0].startswith("generation_config.json")
