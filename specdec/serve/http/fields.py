"""Every field that a request may have: its type, its limits, and what it does here.

A field works, changes nothing, or is refused by name; null counts as absent. One table, so that no
field is ignored by accident: it checks requests, and /openapi.json and /docs are made from it. No
schema refuses what the server takes: clients add fields to messages and tools with each version.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from specdec.arguments import is_integer
from specdec.serve.http import options
from specdec.serve.http.agents.tool_use import CHOICES, MAX_TOOLS, NAME
from specdec.serve.http.errors import MESSAGES, ApiError
from specdec.sizes import MAX_BAD_WORDS

Schema = dict[str, object]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, COUNT_TOKENS = "/v1/responses", f"{MESSAGES}/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_STATE = "answers are not stored; send the whole conversation"
NO_SUCH = "is not supported by this engine"

# schemas of single values


def _limited(kind: str, **limits: float | None) -> Schema:
    return {"type": kind, **{name: each for name, each in limits.items() if each is not None}}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    return _limited("integer", minimum=low, maximum=high)


def number(low: float | None = None, high: float | None = None) -> Schema:
    return _limited("number", minimum=low, maximum=high)


def text(most: int) -> Schema:
    return _limited("string", minLength=1, maxLength=most)


def array(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    return {**_limited("array", minItems=least, maxItems=most), "items": items}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return either(schema, {"type": "null"}) if schema else schema


def shape(**fields: Schema) -> Schema:
    """Describe an object that has all of these fields, and may have others."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def record(
    required: Mapping[str, Schema], optional: Mapping[str, Schema], *, is_open: bool = False
) -> Schema:
    """Describe an object by all its fields. An optional one may be null."""
    found = shape(**required)
    nulls = {name: nullable(schema) for name, schema in optional.items()}
    return {**found, "properties": {**required, **nulls}, "additionalProperties": is_open}


ANY: Schema = {}
TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
COUNT = integer(0)
TOKEN_IDS = array(COUNT)
PARTS = array(either(TEXT, OBJECT))
CONTENT = either(TEXT, PARTS)
CONVERSATION = array(
    record({"role": TEXT}, {"content": CONTENT, "tool_calls": array(ANY)}, is_open=True), 1
)
PROMPTS = either(TEXT, array(COUNT, 1), array(either(TEXT, TOKEN_IDS), 1))
TOOLS = array(
    record(
        {
            "type": one_of("function"),
            "function": record(
                {"name": {**TEXT, "pattern": f"^{NAME.pattern}$"}},
                {"description": TEXT, "parameters": OBJECT, "strict": ANY},
            ),
        },
        {},
    ),
    most=MAX_TOOLS,
)
NAMED_TOOL = shape(type=one_of("function"), function=shape(name=TEXT))
CHOICE = either(one_of(*CHOICES), NAMED_TOOL)
ANY_TOOLS = array(record({}, {"type": TEXT}, is_open=True))
LOGIT_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": number(-100, 100),
    "maxProperties": options.MAX_IDS,
}
JSON_SCHEMA = record({"schema": OBJECT}, {"name": ANY, "description": ANY, "strict": ANY})
RESPONSE_FORMAT = either(
    record({"type": one_of("text", "json_object")}, {}),
    record({"type": one_of("json_schema"), "json_schema": JSON_SCHEMA}, {}),
)
WORDS = array(TEXT, 1)
STRUCTURED = record(
    {},
    {
        "json": either(TEXT, OBJECT),
        "regex": TEXT,
        "choice": WORDS,
        "grammar": TEXT,
        "json_object": one_of(True),
    },
)
STREAM_OPTIONS = record(
    {},
    {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN, "include_obfuscation": BOOLEAN},
)


@dataclass(frozen=True, slots=True)
class Field:
    """Describes a field of a route.

    schema: values that it may have, beside null. is_required: a request without it is refused.
    is_harmless: any value changes nothing. refused: why, for a field whose effect is missing.
    neutral: its values that ask for no effect. is_chats: an agent's route passes it on to chat.
    """

    schema: Schema = field(default_factory=dict)
    is_required: bool = False
    is_harmless: bool = False
    refused: str | None = None
    neutral: tuple[object, ...] = ()
    is_chats: bool = False


Fields = dict[str, Field]


def _works(**schemas: Schema) -> Fields:
    return {name: Field(schema) for name, schema in schemas.items()}


def _required(**schemas: Schema) -> Fields:
    return {name: Field(schema, is_required=True) for name, schema in schemas.items()}


def _harmless(*names: str) -> Fields:
    return {name: Field(is_harmless=True) for name in names}


def _refused(reason: str, **names: tuple[object, ...]) -> Fields:
    return {name: Field(refused=reason, neutral=values) for name, values in names.items()}


def _not_here(**reasons: str) -> Fields:
    """Refuse fields of agents, but for values that ask for no effect."""
    return {
        name: Field(refused=f"is not supported: {reason}", neutral=(False, 0))
        for name, reason in reasons.items()
    }


# they are parameters of sampling under the same names
SAMPLING = _works(
    temperature=number(0),
    top_p=number(0, 1),
    top_k=integer(-1),
    min_p=number(0, 1),
    presence_penalty=number(-2, 2),
    frequency_penalty=number(-2, 2),
    repetition_penalty=number(1e-6, 1e6),
    n=integer(1, options.MAX_SAMPLES),
    seed=integer(),
    stop=either(
        text(options.MAX_STOP_CHARS), array(text(options.MAX_STOP_CHARS), most=options.MAX_STOPS)
    ),
    stop_token_ids=array(COUNT, most=options.MAX_IDS),
    min_tokens=COUNT,
    ignore_eos=BOOLEAN,
    include_stop_str_in_output=BOOLEAN,
    skip_special_tokens=BOOLEAN,
    speculate=BOOLEAN,
    num_speculative_tokens=COUNT,
    bad_words=array(text(options.MAX_WORD_CHARS), most=MAX_BAD_WORDS),
    allowed_token_ids=array(COUNT, 1, options.MAX_ALLOWED_IDS),
)
_PLACE = _works(model=TEXT, stream=BOOLEAN, priority=integer(-(1 << 31), 1 << 31))
_TEMPLATE = _works(chat_template_kwargs=OBJECT)
_SPELLING = _works(add_special_tokens=BOOLEAN)
_CONVERSATION = {
    **_works(add_generation_prompt=BOOLEAN, continue_final_message=BOOLEAN, chat_template=TEXT),
    **_TEMPLATE,
    **_works(tools=TOOLS),
    **_SPELLING,
}
_GENERATING = {
    **_PLACE,
    **SAMPLING,
    **_works(stream_options=STREAM_OPTIONS, logit_bias=LOGIT_BIAS, return_token_ids=BOOLEAN),
    **_works(show_drafts=BOOLEAN, response_format=RESPONSE_FORMAT, structured_outputs=STRUCTURED),
    **_works(guided_json=either(TEXT, OBJECT), guided_regex=TEXT, guided_choice=WORDS),
    **_works(guided_grammar=TEXT),
    **_harmless("store", "metadata", "user", "service_tier"),
    **_harmless("prompt_cache_key", "prompt_cache_retention", "cache_control"),
    **_harmless("safety_identifier", "prediction"),
    **_refused("is not supported: use tools", functions=([],), function_call=("none",)),
    **_refused(NO_SUCH, web_search_options=()),
    **_refused("is not supported: text alone is written", modalities=(["text"],), audio=()),
    **_refused("is not supported: leave it out", verbosity=("medium",), suffix=("",)),
    **_refused("is not supported: give n alone", best_of=(1, True)),
    **_refused(NO_SUCH, use_beam_search=(False, 0), length_penalty=(1, True), cache_salt=()),
    **_refused(NO_SUCH, truncate_prompt_tokens=(), logits_processors=(), mm_processor_kwargs=()),
    **_refused(NO_SUCH, kv_transfer_params=()),
    **_refused("is not supported: use echo with logprobs", prompt_logprobs=()),
    **_refused("is not taken from a body: give the header X-Request-Id", request_id=()),
}
_OF_CHAT = {**_PLACE, **SAMPLING, **_works(logit_bias=LOGIT_BIAS), **_TEMPLATE}
_PASSED = {name: replace(each, is_chats=True) for name, each in _OF_CHAT.items() if name != "n"}
_TURNS = array(record({"role": one_of("user", "assistant", "system")}, {}, is_open=True), 1)
_OF_MESSAGES = {
    **_PASSED,
    **_required(messages=_TURNS, max_tokens=integer(1, 1 << 31)),
    **_works(system=CONTENT, tools=ANY_TOOLS, tool_choice=OBJECT, stop_sequences=array(TEXT)),
    **_works(thinking=OBJECT, output_config=OBJECT),
    **_not_here(container="nothing is run here"),
    **_harmless("metadata", "cache_control", "service_tier", "inference_geo", "speed"),
    **_harmless("diagnostics"),
}

FIELDS: dict[str, Fields] = {
    CHAT: {
        **_required(messages=CONVERSATION),
        **_GENERATING,
        **_CONVERSATION,
        **_works(max_tokens=integer(1), max_completion_tokens=integer(1), logprobs=BOOLEAN),
        **_works(top_logprobs=integer(0, options.MAX_LOGPROBS), tool_choice=CHOICE),
        **_works(parallel_tool_calls=BOOLEAN, reasoning_effort=one_of(*EFFORTS)),
        **_works(documents=array(OBJECT)),
    },
    COMPLETION: {
        **_required(prompt=PROMPTS),
        **_GENERATING,
        **_SPELLING,
        **_works(max_tokens=COUNT, logprobs=integer(0, options.MAX_LOGPROBS), echo=BOOLEAN),
    },
    RESPONSES: {
        **_PASSED,
        **_required(input=either(TEXT, array(OBJECT, 1))),
        **_works(instructions=CONTENT, max_output_tokens=integer(1, 1 << 31), tools=ANY_TOOLS),
        **_works(tool_choice=either(TEXT, OBJECT), parallel_tool_calls=BOOLEAN, text=OBJECT),
        **_works(reasoning=OBJECT, include={}, truncation={}),
        **_not_here(previous_response_id=NO_STATE, conversation=NO_STATE),
        **_not_here(background="answers are not stored; leave it out"),
        **_not_here(prompt="prompts are not stored; send the text"),
        **_not_here(top_logprobs=f"{CHAT} has it"),
        **_harmless("store", "metadata", "user", "service_tier", "safety_identifier"),
        **_harmless("stream_options", "prompt_cache_key", "prompt_cache_retention"),
        **_harmless("prompt_cache_options", "max_tool_calls"),
    },
    MESSAGES: _OF_MESSAGES,
    COUNT_TOKENS: {**_OF_MESSAGES, "max_tokens": Field()},  # which nothing reads
    TOKENIZE: {
        **_works(model=TEXT, prompt=TEXT, messages=CONVERSATION, return_token_strs=BOOLEAN),
        **_CONVERSATION,
        **_works(parse_special=BOOLEAN, tools=array(OBJECT)),
    },
    DETOKENIZE: {**_works(model=TEXT), **_required(tokens=TOKEN_IDS)},
}


def known_fields(
    route: str, body: Mapping[str, object], ignore: Callable[[str], object] | None = None
) -> dict[str, object]:
    """Return the fields that have an effect. ApiError names one that is refused.

    ignore: called with each unknown name; without it the name is refused.
    """
    fields = FIELDS[route]
    found: dict[str, object] = {}
    for name, value in body.items():
        known = fields.get(name)
        if known is None:
            if ignore is None:
                raise ApiError(400, _unknown(name, fields), name)
            if value is not None:
                ignore(name)
        elif value is None or known.is_harmless:
            continue
        elif known.refused is None:
            check_value(name, value, known.schema)
            found[name] = value
        elif value not in known.neutral:
            raise ApiError(400, f"{name} {known.refused}", name)
    return found


def check_value(name: str, value: object, schema: Schema) -> None:
    """Check a truth value or an integer with limits. SamplingParams and others check the rest."""
    kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    if kind == "boolean" and name not in SAMPLING and not isinstance(value, bool):
        raise ApiError(400, f"{name}={value!r}: give true or false", name)
    if kind != "integer" or not isinstance(low, int) or not isinstance(high, int):
        return
    if not is_integer(value) or not low <= value <= high:
        raise ApiError(400, f"{name}={value!r}: give an integer from {low} to {high}", name)


def _unknown(name: str, fields: Fields) -> str:
    close = difflib.get_close_matches(name[:100], fields, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown field {name!r:.100}{hint}"
