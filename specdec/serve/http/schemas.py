"""JSON schemas of values in requests and answers, for /openapi.json and /docs.

Functions make schemas of single values; the constants below them describe nested ones. No schema
refuses what the server takes: clients add fields to messages and tools with each version.
"""

from collections.abc import Mapping

from specdec.serve.http.agents.tool_use import CHOICES, MAX_TOOLS, NAME
from specdec.serve.http.options import MAX_IDS

Schema = dict[str, object]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    """Describe an integer within limits."""
    return _limited("integer", minimum=low, maximum=high)


def number(low: float | None = None, high: float | None = None) -> Schema:
    """Describe a number within limits."""
    return _limited("number", minimum=low, maximum=high)


def text(most: int) -> Schema:
    """Describe a text of 1 to `most` characters."""
    return _limited("string", minLength=1, maxLength=most)


def array(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    """Describe a list."""
    return {**_limited("array", minItems=least, maxItems=most), "items": items}


def one_of(*values: object) -> Schema:
    """Describe a value that is one of these."""
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Describe a value that follows any of several schemas."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Describe a value that may be null too."""
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


def _limited(kind: str, **limits: float | None) -> Schema:
    return {"type": kind, **{name: each for name, each in limits.items() if each is not None}}


# values of requests

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
    "maxProperties": MAX_IDS,
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

# answers

ERROR = shape(error=shape(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))
ANTHROPIC_ERROR = shape(type=one_of("error"), error=shape(type=TEXT, message=TEXT))
USAGE = shape(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=shape(cached_tokens=COUNT),
    completion_tokens_details=shape(
        accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT
    ),
)
_CHOICE = {
    "index": COUNT,
    "logprobs": nullable(OBJECT),
    "finish_reason": one_of("stop", "length", "tool_calls"),
    "stop_reason": nullable(either(TEXT, COUNT)),
}
_MESSAGE = shape(role=one_of("assistant"), content=nullable(TEXT), refusal=nullable(TEXT))


def _answer(name: str, **choice: Schema) -> Schema:
    """Describe an answer with choices."""
    choices = array(shape(**_CHOICE, **choice))
    head = {"id": TEXT, "object": one_of(name), "created": COUNT, "model": TEXT}
    return shape(**head, choices=choices, usage=USAGE)


CHAT_ANSWER = _answer("chat.completion", message=_MESSAGE)
COMPLETION_ANSWER = _answer("text_completion", text=TEXT)
RESPONSE = shape(
    id=TEXT,
    object=one_of("response"),
    created_at=COUNT,
    status=one_of("completed", "incomplete"),
    error=nullable(OBJECT),
    model=TEXT,
    output=array(shape(type=one_of("message", "reasoning", "function_call"))),
    usage=shape(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
MESSAGE = shape(
    id=TEXT,
    type=one_of("message"),
    role=one_of("assistant"),
    model=TEXT,
    content=array(shape(type=one_of("text", "thinking", "tool_use"))),
    stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    stop_sequence=nullable(TEXT),
    usage=shape(input_tokens=COUNT, cache_read_input_tokens=COUNT, output_tokens=COUNT),
)
MODEL = shape(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
MODELS = shape(object=one_of("list"), data=array(MODEL))
TOKENS = shape(count=COUNT, max_model_len=COUNT, tokens=TOKEN_IDS)
