"""What a checkpoint recommends, and that its errors name the checkpoint's file."""

import json

import pytest

from specdec import SamplingParams
from specdec.requests.params import recommended_params
from weights.errors import CheckpointError


def test_known_fields_are_read_and_others_are_not(tmp_path):
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
