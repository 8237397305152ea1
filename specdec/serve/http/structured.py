"""The grammar that an answer must follow, by any of the fields that can give one."""

from collections.abc import Mapping

from specdec.requests.params import SamplingParams
from specdec.requests.structured_outputs import GrammarsBusyError, StructuredOutputsParams
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.http.errors import ApiError

# vLLM's earlier names of the fields of structured_outputs
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
GRAMMARS_BUSY = "grammars_busy"  # the code of an error that a later try may not meet
FIELDS = ("response_format", "structured_outputs", *GUIDED)
FORMAT_KEYS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
SCHEMA_KEYS = {"name", "description", "schema", "strict"}


def grammar_field(body: Mapping[str, object]) -> str | None:
    """The name of the field that gives a grammar; ApiError if there are several."""
    given = [name for name in FIELDS if name in body and body[name] != {"type": "text"}]
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)}: give one of them", given[1])
    return given[0] if given else None


def structured_outputs(body: Mapping[str, object]) -> StructuredOutputsParams | None:
    """Read them from fields that are known; nothing is compiled yet."""
    name = grammar_field(body)
    if name is None:
        return None
    value = body[name]
    try:
        if name == "response_format":
            return StructuredOutputsParams.of(_of_format(value))
        return StructuredOutputsParams.of(value if name not in GUIDED else {GUIDED[name]: value})
    except ValueError as error:
        raise grammar_error(error, name) from error


async def check_grammar(llm: AsyncEngine, params: SamplingParams, name: str | None) -> None:
    """Compile it before the engine needs it, whose steps would wait; ApiError if it is bad.

    name: the field that gives it.
    """
    if params.structured_outputs is not None:
        try:
            await llm.check_grammar(params)
        except GrammarsBusyError as error:
            raise ApiError(503, f"{name}: {error}", name, GRAMMARS_BUSY) from error
        except ValueError as error:
            raise grammar_error(error, name) from error


def grammar_error(error: ValueError, name: str | None) -> ApiError:
    """By the name of the field that the request has."""
    return ApiError(400, f"{name}: {str(error).removeprefix('structured_outputs: ')}")


def _of_format(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or str(value.get("type")) not in FORMAT_KEYS:
        raise ValueError(f'give {{"type": one of {", ".join(FORMAT_KEYS)}}}')
    kind = str(value["type"])
    _check_keys(value, FORMAT_KEYS[kind])
    if kind == "json_object":
        return {"json_object": True}
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ValueError('give {"type": "json_schema", "json_schema": {"schema": {...}}}')
    _check_keys(schema, SCHEMA_KEYS)
    return {"json": schema["schema"]}


def _check_keys(given: Mapping[str, object], allowed: set[str]) -> None:
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise ValueError(
            f"unknown {', '.join(unknown)!r:.200}; known are {', '.join(sorted(allowed))}"
        )
