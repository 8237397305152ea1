"""Parameters are checked when they are made; what does not exist yet is refused by name."""

import pytest

from specdec import SamplingParams


def test_names_and_defaults_are_those_of_vllm():
    params = SamplingParams(temperature=0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (
        256,
        0,
        (),
        (),
    )
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
        ({"temperature": 1e-5}, "temperature=1e-05: give 0"),
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
        ({"seed": -1}, "seed=-1: give an integer from 0"),
        ({"seed": 1 << 64}, "seed=18446744073709551616"),
        ({"n": 0}, "n=0: give an integer from 1 to 1024"),
        ({"n": 1025}, "n=1025: give an integer from 1 to 1024"),
        ({"n": 2}, "n=2 with temperature=0"),
        ({"logprobs": 21}, "logprobs=21: give an integer from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
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
    "values", [{"top_p": 1.0}, {"top_k": -1}, {"n": 1}, {"seed": None}, {"repetition_penalty": 1}]
)
def test_values_that_change_nothing_are_taken(values):
    assert SamplingParams(temperature=0.0, **values) == SamplingParams(temperature=0.0)


def test_params_do_not_change():
    with pytest.raises(AttributeError):
        SamplingParams(temperature=0.0).max_tokens = 3
