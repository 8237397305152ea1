"""/openapi.json: what can be asked, made from the table of fields that checks requests."""

from dataclasses import dataclass

import specdec
from specdec.serve.http.errors import MESSAGES
from specdec.serve.http.fields import (
    CHAT,
    COMPLETION,
    COUNT_TOKENS,
    DETOKENIZE,
    FIELDS,
    RESPONSES,
    TOKENIZE,
    Field,
)
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.schemas import (
    ANTHROPIC_ERROR,
    CHAT_ANSWER,
    COMPLETION_ANSWER,
    COUNT,
    ERROR,
    MESSAGE,
    MODEL,
    MODELS,
    OBJECT,
    RESPONSE,
    TEXT,
    TOKENS,
    Schema,
    nullable,
    shape,
)

JSON, EVENTS = "application/json", "text/event-stream"
ABOUT = (
    "Fields that are null count as absent. Sampling parameters are those of SamplingParams. "
    "Every route of GET takes HEAD and OPTIONS too."
)
NEEDS = {
    "chat_template": "The server must run with --trust-request-chat-template.",
    "priority": "The server must run with --allow-priority.",
}


@dataclass(frozen=True, slots=True)
class Post:
    """A route of POST. has_stream: `stream` makes its answer a stream of events."""

    name: str
    summary: str
    answer: Schema
    has_stream: bool = False


POSTS = {
    CHAT: Post("Chat", "Continue a conversation (OpenAI).", CHAT_ANSWER, True),
    COMPLETION: Post("Completion", "Continue a text (OpenAI).", COMPLETION_ANSWER, True),
    RESPONSES: Post("Response", "Continue a conversation of an agent (OpenAI).", RESPONSE, True),
    MESSAGES: Post("Message", "Continue a conversation (Anthropic).", MESSAGE, True),
    COUNT_TOKENS: Post(
        "TokenCount", "Count the tokens of a message's prompt.", shape(input_tokens=COUNT)
    ),
    TOKENIZE: Post("Tokens", "Return the token ids of a prompt or a conversation.", TOKENS),
    DETOKENIZE: Post("Text", "Return the text of token ids.", shape(prompt=TEXT)),
}
GETS = {
    "/v1/models": ("List the models.", JSON, MODELS),
    "/v1/models/{name}": ("Describe a model.", JSON, MODEL),
    "/health": ("Tell by 200 or 503 whether requests are answered.", None, {}),
    "/ping": ("Tell the same as /health.", None, {}),
    "/version": ("Return the server's version.", JSON, shape(version=TEXT)),
    "/metrics": ("Return counters for Prometheus.", "text/plain", TEXT),
    "/openapi.json": ("Return this description.", JSON, OBJECT),
    "/docs": ("Show this description as a page.", "text/html", TEXT),
}
NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": TEXT}


def document(options: ServerOptions) -> dict[str, object]:
    """Describe the server in OpenAPI 3.1."""
    requests = {f"{post.name}Request": _request(path, options) for path, post in POSTS.items()}
    answers = {post.name: post.answer for post in POSTS.values()}
    errors = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": specdec.__version__, "description": ABOUT},
        "paths": {
            **{path: {"post": _post(path, post)} for path, post in POSTS.items()},
            **{path: {"get": _get(path, *each)} for path, each in GETS.items()},
        },
        "components": {"schemas": {**requests, **answers, **errors}, "securitySchemes": keys},
        "security": [] if options.api_key is None else [{name: []} for name in keys],
    }


def takes_more(path: str, options: ServerOptions) -> bool:
    """Say whether a route ignores unknown fields; those of agents always do."""
    return options.ignore_unknown or path in (RESPONSES, MESSAGES, COUNT_TOKENS)


def _request(path: str, options: ServerOptions) -> Schema:
    fields = FIELDS[path]
    return {
        "type": "object",
        "properties": {name: _field(name, each) for name, each in fields.items()},
        "required": [name for name, each in fields.items() if each.is_required],
        "additionalProperties": takes_more(path, options),
    }


def _field(name: str, field: Field) -> Schema:
    if field.refused is not None:
        return {"enum": [*field.neutral, None], "description": f"It {field.refused}."}
    if field.is_harmless:
        return {"description": "It changes nothing here."}
    schema = field.schema if field.is_required else nullable(field.schema)
    return {**schema, "description": NEEDS[name]} if name in NEEDS else schema


def _post(path: str, post: Post) -> Schema:
    content: Schema = {JSON: {"schema": _ref(post.name)}}
    if post.has_stream:
        content[EVENTS] = {"schema": TEXT}
    error = "AnthropicError" if path.startswith(MESSAGES) else "Error"
    return {
        "summary": post.summary,
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": _ref(f"{post.name}Request")}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": _error(error),
        },
    }


def _get(path: str, summary: str, kind: str | None, schema: Schema) -> Schema:
    answer: Schema = {"description": "The answer."}
    responses: Schema = {"200": answer, "default": _error("Error")}
    if kind is not None:
        answer["content"] = {kind: {"schema": schema}}
    else:
        responses["503"] = {"description": "Requests would fail."}
    found: Schema = {"summary": summary, "responses": responses}
    return {**found, "parameters": [NAME]} if "{name}" in path else found


def _error(name: str) -> Schema:
    return {"description": "An error.", "content": {JSON: {"schema": _ref(name)}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
