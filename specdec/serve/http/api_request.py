"""What a generating request asks for: its fields as sampling parameters and as ways to answer.

The table of fields has been checked (fields.py), and SamplingParams checks the values of sampling;
here are the names that differ, and the limits of a request that comes over a network.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specdec.arguments import is_integer
from specdec.requests.params import LISTS, RequestOutputKind, SamplingParams
from specdec.requests.structured_outputs import GrammarsBusyError, StructuredOutputsParams
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.http import options as limits
from specdec.serve.http.errors import ApiError, ContextError
from specdec.serve.http.fields import BOOLEAN, SAMPLING, check_value
from specdec.serve.http.options import ServerOptions
from specdec.sizes import MAX_BAD_WORDS

Body = Mapping[str, object]

COMPLETION_TOKENS = 16  # of a completion without max_tokens, as OpenAI's
LEAST_TOP_P = 1e-9  # for 0, which OpenAI takes: the best token alone
TOKEN_ID = re.compile(r"\d{1,18}", re.ASCII)  # as a key; Python reads no number of any length
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
# entries, and characters of each
SIZES = {
    "stop": (limits.MAX_STOPS, limits.MAX_STOP_CHARS),
    "bad_words": (MAX_BAD_WORDS, limits.MAX_WORD_CHARS),
    "stop_token_ids": (limits.MAX_IDS, 0),
    "allowed_token_ids": (limits.MAX_ALLOWED_IDS, 0),
}

# vLLM's earlier names of the fields of structured_outputs
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
GRAMMAR_FIELDS = ("response_format", "structured_outputs", *GUIDED)
GRAMMARS_BUSY = "grammars_busy"  # the code of an error that a later try may not meet
FORMAT_KEYS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
SCHEMA_KEYS = {"name", "description", "schema", "strict"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """Holds what a body asks for.

    writes_nothing: max_tokens=0, for which the engine writes one token that is dropped.
    shows_drafts: each choice has its rounds, with what was drafted in them.
    limit_field: the name of the field that sets max_tokens, None if the request has none.
    """

    model: str
    params: SamplingParams
    priority: int
    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_token_ids: bool
    echo: bool
    writes_nothing: bool
    shows_drafts: bool
    limit_field: str | None


def chat_request(body: Body, options: ServerOptions, defaults: Body) -> ApiRequest:
    """Read a request to /v1/chat/completions from its known fields."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(given) == 2 and body["max_tokens"] != body["max_completion_tokens"]:
        raise ApiError(400, "max_completion_tokens and max_tokens differ: give one of them")
    limit_field = given[0] if given else None
    sampling = {**defaults, "max_tokens": body[limit_field] if limit_field else None}
    num_top = body.get("top_logprobs", 0)
    if body.get("logprobs"):
        sampling["logprobs"] = num_top
    elif num_top:
        raise ApiError(400, f"top_logprobs={num_top} without logprobs: give logprobs=true too")
    return _api_request(body, options, sampling, limit_field)


def completion_request(body: Body, options: ServerOptions, defaults: Body) -> ApiRequest:
    """Read a request to /v1/completions from its known fields."""
    limit, num_top = body.get("max_tokens", COMPLETION_TOKENS), body.get("logprobs")
    writes_nothing = is_integer(limit) and limit == 0
    sampling = {**defaults, "max_tokens": 1 if writes_nothing else limit, "logprobs": num_top}
    if body.get("echo"):
        sampling["prompt_logprobs"] = num_top
    limit_field = "max_tokens" if "max_tokens" in body else None
    return _api_request(body, options, sampling, limit_field, writes_nothing)


def check_room(
    api_request: ApiRequest, prompt_lengths: Iterable[int], max_model_len: int, what: str
) -> None:
    """Raise ContextError if max_tokens reaches beyond the context; a default one is cut there."""
    limit, name = api_request.params.max_tokens, api_request.limit_field
    longest = max(prompt_lengths)
    if name is not None and limit is not None and limit > max_model_len - longest:
        shown_limit = min(limit, 1 << 62)  # the sum must have digits that Python will write
        raise ContextError(max_model_len, longest, what, num_output=shown_limit, param=name)


def check_model(name: object, options: ServerOptions) -> str:
    """Return the model's name, which answers repeat; ApiError for one that is not served here."""
    if not isinstance(name, str):
        raise ApiError(400, f"model={name!r}: give a string")
    if name not in options.model_names:
        served = ", ".join(options.model_names)
        raise ApiError(404, f"model {name!r:.100}: served is {served}", "model", "model_not_found")
    return name


def _api_request(
    body: Body,
    options: ServerOptions,
    sampling: dict[str, object],
    limit_field: str | None,
    writes_nothing: bool = False,
) -> ApiRequest:
    stream_options = _stream_options(body)
    params = _params(body, sampling)
    priority = body.get("priority", 0)
    assert isinstance(priority, int), priority
    if priority != 0 and not options.allow_priority:
        raise ApiError(400, "priority: refused, since the server runs without --allow-priority")
    if body.get("show_drafts") and params.n > 1:
        reason = f"show_drafts with n={params.n}: it shows the rounds of one sample; leave one out"
        raise ApiError(400, reason, "show_drafts")
    return ApiRequest(
        model=check_model(body.get("model", options.model_names[0]), options),
        params=params,
        priority=priority,
        is_stream=bool(body.get("stream")),
        includes_usage=bool(stream_options.get("include_usage")),
        has_continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        returns_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")),
        writes_nothing=writes_nothing,
        shows_drafts=bool(body.get("show_drafts")),
        limit_field=limit_field,
    )


def _params(body: Body, sampling: dict[str, object]) -> SamplingParams:
    sampling |= {name: _bounded(name, body[name]) for name in SAMPLING if name in body}
    if type(sampling.get("top_p")) in (int, float) and sampling["top_p"] == 0:
        sampling["top_p"] = LEAST_TOP_P
    sampling["logit_bias"] = _logit_bias(body)
    sampling["structured_outputs"] = _structured_outputs(body)
    try:
        return SamplingParams(
            **sampling,  # type: ignore[arg-type]
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _bounded(name: str, value: object) -> object:
    """Refuse what nests or is long before anything walks over it."""
    items = value if isinstance(value, list) and name in LISTS else [value]
    if any(isinstance(each, list | dict) for each in items):
        raise ApiError(400, f"{name}={reprlib.repr(value)}: give {LISTS.get(name, 'one value')}")
    most, most_chars = SIZES.get(name, (1, 0))
    _check_number(name, items, most)
    if most_chars and any(isinstance(each, str) and len(each) > most_chars for each in items):
        raise ApiError(400, f"{name}: at most {most_chars} characters are allowed in each")
    return value


def _check_number(name: str, values: list[object] | dict[str, object], most: int) -> None:
    if len(values) > most:
        raise ApiError(400, f"{name}: {len(values)} given, at most {most} are allowed")


def _logit_bias(body: Body) -> dict[int, object] | None:
    """Read token ids from the keys, since JSON has no keys but strings."""
    bias = body.get("logit_bias")
    if bias is None:
        return None
    if isinstance(bias, list | dict):
        _check_number("logit_bias", bias, limits.MAX_IDS)
    if not isinstance(bias, dict) or not all(map(TOKEN_ID.fullmatch, bias)):
        raise ApiError(400, f"logit_bias={bias!r}: give {{token id: number from -100 to 100}}")
    return {int(key): value for key, value in bias.items()}


def _stream_options(body: Body) -> Body:
    given = body.get("stream_options", {})
    if not isinstance(given, dict) or set(given) - set(STREAM_OPTIONS):
        wanted = "{" + ", ".join(f"{name}: true or false" for name in STREAM_OPTIONS) + "}"
        raise ApiError(400, f"stream_options={given!r}: give {wanted}")
    if given and not body.get("stream"):
        raise ApiError(400, "stream_options without stream: give stream=true too")
    for name, value in given.items():
        if value is not None:
            check_value(name, value, BOOLEAN)
    return given


def grammar_field(body: Body) -> str | None:
    """Return the name of the field that gives a grammar; ApiError if there are several."""
    given = [name for name in GRAMMAR_FIELDS if name in body and body[name] != {"type": "text"}]
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)}: give one of them", given[1])
    return given[0] if given else None


def _structured_outputs(body: Body) -> StructuredOutputsParams | None:
    name = grammar_field(body)
    if name is None:
        return None
    value = body[name]
    try:
        if name == "response_format":
            return StructuredOutputsParams.of(_of_format(value))
        return StructuredOutputsParams.of(value if name not in GUIDED else {GUIDED[name]: value})
    except ValueError as error:
        raise _grammar_error(error, name) from error


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
            raise _grammar_error(error, name) from error


def _grammar_error(error: ValueError, name: str | None) -> ApiError:
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
