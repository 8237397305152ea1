"""What a generating request asks for: its fields as sampling parameters and as ways to answer.

SamplingParams checks the values of sampling; here are the names that differ, and the limits of a
request that comes over a network.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specdec.arguments import is_integer
from specdec.requests.params import LISTS, RequestOutputKind, SamplingParams
from specdec.serve.http.errors import ApiError, ContextError
from specdec.serve.http.fields import SAMPLING
from specdec.serve.http.options import (
    MAX_ALLOWED_IDS,
    MAX_IDS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_WORD_CHARS,
    ServerOptions,
)
from specdec.serve.http.structured import structured_outputs
from specdec.sizes import MAX_BAD_WORDS

COMPLETION_TOKENS = 16  # of a completion without max_tokens, as OpenAI's
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LEAST_TOP_P = 1e-9  # for 0, which OpenAI takes: the best token alone
TOKEN_ID = re.compile(r"\d{1,18}", re.ASCII)  # as a key; Python reads no number of any length
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """writes_nothing: max_tokens=0, for which the engine writes one token that is dropped.

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
    echo: bool = False
    writes_nothing: bool = False
    shows_drafts: bool = False
    limit_field: str | None = None


def chat_request(
    body: Mapping[str, object], options: ServerOptions, defaults: Mapping[str, object]
) -> ApiRequest:
    """Read a request to /v1/chat/completions from its known fields."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(given) == 2 and body["max_tokens"] != body["max_completion_tokens"]:
        raise ApiError(400, "max_completion_tokens and max_tokens differ: give one of them")
    limit_field = given[0] if given else None
    sampling = {"max_tokens": body[limit_field] if limit_field else None}
    num_top = integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if boolean(body, "logprobs"):
        sampling["logprobs"] = num_top or 0
    elif num_top:
        raise ApiError(400, f"top_logprobs={num_top} without logprobs: give logprobs=true too")
    return _api_request(body, options, defaults, sampling, limit_field=limit_field)


def completion_request(
    body: Mapping[str, object], options: ServerOptions, defaults: Mapping[str, object]
) -> ApiRequest:
    """Read a request to /v1/completions from its known fields."""
    limit = body.get("max_tokens", COMPLETION_TOKENS)
    writes_nothing = is_integer(limit) and limit == 0
    echo = boolean(body, "echo")
    num_top = integer(body, "logprobs", 0, MAX_LOGPROBS)
    sampling = {"max_tokens": 1 if writes_nothing else limit, "logprobs": num_top}
    if echo:
        sampling["prompt_logprobs"] = num_top
    return _api_request(
        body,
        options,
        defaults,
        sampling,
        limit_field="max_tokens" if "max_tokens" in body else None,
        echo=echo,
        writes_nothing=writes_nothing,
    )


def check_room(
    api_request: ApiRequest, prompt_lengths: Iterable[int], max_model_len: int, what: str
) -> None:
    """Raise ContextError if max_tokens reaches beyond the context; a default one is cut there."""
    limit, name = api_request.params.max_tokens, api_request.limit_field
    longest = max(prompt_lengths)
    if name is not None and limit is not None and limit > max_model_len - longest:
        shown_limit = min(limit, 1 << 62)  # the sum must have digits that Python will write
        raise ContextError(max_model_len, longest, what, num_output=shown_limit, param=name)


def _api_request(
    body: Mapping[str, object],
    options: ServerOptions,
    defaults: Mapping[str, object],
    sampling: dict[str, object],
    *,
    limit_field: str | None = None,
    echo: bool = False,
    writes_nothing: bool = False,
) -> ApiRequest:
    stream_options = _stream_options(body)
    params = _params(body, {**defaults, **sampling})
    return ApiRequest(
        model=model_name(body, options),
        params=params,
        priority=_priority(body, options),
        is_stream=boolean(body, "stream"),
        includes_usage=boolean(stream_options, "include_usage"),
        has_continuous_usage=boolean(stream_options, "continuous_usage_stats"),
        returns_token_ids=boolean(body, "return_token_ids"),
        echo=echo,
        writes_nothing=writes_nothing,
        shows_drafts=_shows_drafts(body, params.n),
        limit_field=limit_field,
    )


def _shows_drafts(body: Mapping[str, object], n: int) -> bool:
    found = boolean(body, "show_drafts")
    if found and n > 1:
        message = f"show_drafts with n={n}: it shows the rounds of one sample; leave one out"
        raise ApiError(400, message, "show_drafts")
    return found


def _params(body: Mapping[str, object], sampling: dict[str, object]) -> SamplingParams:
    sampling |= {name: _shallow(name, body[name]) for name in SAMPLING if name in body}
    if type(sampling.get("top_p")) in (int, float) and sampling["top_p"] == 0:
        sampling["top_p"] = LEAST_TOP_P
    sampling["logit_bias"] = _logit_bias(body)
    sampling["structured_outputs"] = structured_outputs(body)
    integer(body, "n", 1, MAX_SAMPLES)
    _check_texts("stop", body.get("stop"), MAX_STOPS, MAX_STOP_CHARS)
    _check_texts("bad_words", body.get("bad_words"), MAX_BAD_WORDS, MAX_WORD_CHARS)
    _check_length("stop_token_ids", body.get("stop_token_ids"), MAX_IDS)
    _check_length("allowed_token_ids", body.get("allowed_token_ids"), MAX_ALLOWED_IDS)
    try:
        return SamplingParams(
            **sampling,  # type: ignore[arg-type]
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _shallow(name: str, value: object) -> object:
    """Refuse what nests before anything walks over it."""
    items = value if isinstance(value, list) and name in LISTS else [value]
    if any(isinstance(each, list | dict) for each in items):
        wanted = LISTS.get(name, "one value")
        raise ApiError(400, f"{name}={reprlib.repr(value)}: give {wanted}")
    return value


def _logit_bias(body: Mapping[str, object]) -> dict[int, object] | None:
    """Read token ids from the keys, since JSON has no keys but strings."""
    bias = body.get("logit_bias")
    if bias is None:
        return None
    _check_length("logit_bias", bias, MAX_IDS)
    if not isinstance(bias, dict) or not all(map(TOKEN_ID.fullmatch, bias)):
        raise ApiError(400, f"logit_bias={bias!r}: give {{token id: number from -100 to 100}}")
    return {int(key): value for key, value in bias.items()}


def _check_texts(name: str, value: object, most: int, most_chars: int) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return  # SamplingParams says what is allowed
    _check_length(name, texts, most)
    if any(isinstance(text, str) and len(text) > most_chars for text in texts):
        raise ApiError(400, f"{name}: at most {most_chars} characters are allowed in each")


def _check_length(name: str, values: object, most: int) -> None:
    if isinstance(values, list | dict) and len(values) > most:
        raise ApiError(400, f"{name}: {len(values)} given, at most {most} are allowed")


def model_name(body: Mapping[str, object], options: ServerOptions) -> str:
    """Return the name that the answer repeats; ApiError for a model that is not served here."""
    name = body.get("model", options.model_names[0])
    if not isinstance(name, str):
        raise ApiError(400, f"model={name!r}: give a string")
    check_model(name, options)
    return name


def check_model(name: str, options: ServerOptions) -> None:
    """Raise ApiError for a model that is not served here."""
    if name not in options.model_names:
        served = ", ".join(options.model_names)
        raise ApiError(404, f"model {name!r:.100}: served is {served}", "model", "model_not_found")


def _priority(body: Mapping[str, object], options: ServerOptions) -> int:
    if body.get("priority", 0) != 0 and not options.allow_priority:
        raise ApiError(400, "priority: refused, since the server runs without --allow-priority")
    return integer(body, "priority", -(1 << 31), 1 << 31) or 0


def _stream_options(body: Mapping[str, object]) -> Mapping[str, object]:
    given = body.get("stream_options", {})
    if not isinstance(given, dict) or set(given) - set(STREAM_OPTIONS):
        wanted = "{" + ", ".join(f"{name}: true or false" for name in STREAM_OPTIONS) + "}"
        raise ApiError(400, f"stream_options={given!r}: give {wanted}")
    if given and not boolean(body, "stream"):
        raise ApiError(400, "stream_options without stream: give stream=true too")
    boolean(given, "include_obfuscation")  # which changes nothing here
    return given


def boolean(body: Mapping[str, object], name: str, default: bool = False) -> bool:
    """Read a field that is true or false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise ApiError(400, f"{name}={value!r}: give true or false", name)
    return default if value is None else value


def integer(body: Mapping[str, object], name: str, low: int, high: int) -> int | None:
    """Read a field that is an integer from `low` to `high`."""
    value = body.get(name)
    if value is None or (is_integer(value) and low <= value <= high):
        return value
    raise ApiError(400, f"{name}={value!r}: give an integer from {low} to {high}", name)
