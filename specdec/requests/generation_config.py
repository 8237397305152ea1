"""The sampling that a checkpoint recommends in generation_config.json."""

from pathlib import Path

from specdec.arguments import from_mapping
from specdec.requests.params import SamplingParams
from weights.errors import CheckpointError, Problems
from weights.fields import read_json_object

# the ones that vLLM reads, and what they are called here
FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended_params(directory: Path) -> SamplingParams:
    """Read the file's sampling, else the defaults; CheckpointError if it is invalid."""
    file = directory / "generation_config.json"
    problems = Problems(directory)
    given = read_json_object(file, problems) if file.is_file() else {}
    problems.raise_if_any()
    values = {FIELDS[name]: given[name] for name in FIELDS if given.get(name) is not None}
    try:
        return from_mapping(SamplingParams, values)
    except ValueError as error:
        raise CheckpointError(directory, (f"{file.name}: {error}",)) from error
