"""/openapi.json and /docs say what can be asked, by the table of fields that checks requests."""

import json
from html import escape
from typing import cast

import specdec
from specdec.serve.http import fields
from specdec.serve.http.errors import MESSAGES
from specdec.serve.http.fields import FIELDS, OBJECT, TEXT, Field, Schema, nullable, one_of, shape
from specdec.serve.http.options import ServerOptions

JSON, EVENTS = "application/json", "text/event-stream"
ABOUT = (
    "Fields that are null count as absent. Sampling parameters are those of SamplingParams. "
    "Every route of GET takes HEAD and OPTIONS too."
)
NEEDS = {
    "chat_template": "The server must run with --trust-request-chat-template.",
    "priority": "The server must run with --allow-priority.",
}
# routes: the name of a request, and what is answered
POSTS = {
    fields.CHAT: ("Chat", "Continue a conversation (OpenAI)."),
    fields.COMPLETION: ("Completion", "Continue a text (OpenAI)."),
    fields.RESPONSES: ("Response", "Continue a conversation of an agent (OpenAI)."),
    MESSAGES: ("Message", "Continue a conversation (Anthropic)."),
    fields.COUNT_TOKENS: ("TokenCount", "Count the tokens of a message's prompt."),
    fields.TOKENIZE: ("Tokens", "Return the token ids of a prompt or a conversation."),
    fields.DETOKENIZE: ("Text", "Return the text of token ids."),
}
STREAMS = (fields.CHAT, fields.COMPLETION, fields.RESPONSES, MESSAGES)
GETS = {
    "/v1/models": ("List the models.", JSON),
    "/v1/models/{name}": ("Describe a model.", JSON),
    "/health": ("Tell by 200 or 503 whether requests are answered.", None),
    "/ping": ("Tell the same as /health.", None),
    "/version": ("Return the server's version.", JSON),
    "/metrics": ("Return counters for Prometheus.", "text/plain"),
    "/openapi.json": ("Return this description.", JSON),
    "/docs": ("Show this description as a page.", "text/html"),
}
ERRORS: Schema = {
    "Error": shape(error=shape(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT))),
    "AnthropicError": shape(type=one_of("error"), error=shape(type=TEXT, message=TEXT)),
}
NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": TEXT}
HEAD = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>specdec: routes and fields</title>
  <link rel="icon" href="/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/page/docs.css">
</head>
<body>
<h1>Routes and fields</h1>
"""


def document(options: ServerOptions) -> dict[str, object]:
    """Describe the server's requests and errors in OpenAPI 3.1; answers are the vendors'."""
    requests = {f"{name}Request": _request(path, options) for path, (name, _) in POSTS.items()}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": specdec.__version__, "description": ABOUT},
        "paths": {
            **{path: {"post": _post(path, *each)} for path, each in POSTS.items()},
            **{path: {"get": _get(path, *each)} for path, each in GETS.items()},
        },
        "components": {"schemas": {**requests, **ERRORS}, "securitySchemes": keys},
        "security": [] if options.api_key is None else [{name: []} for name in keys],
    }


def takes_more(path: str, options: ServerOptions) -> bool:
    """Say whether a route ignores unknown fields; those of agents always do."""
    agents = (fields.RESPONSES, MESSAGES, fields.COUNT_TOKENS)
    return options.ignore_unknown or path in agents


def _request(path: str, options: ServerOptions) -> Schema:
    return {
        "type": "object",
        "properties": {name: _field(name, each) for name, each in FIELDS[path].items()},
        "required": [name for name, each in FIELDS[path].items() if each.is_required],
        "additionalProperties": takes_more(path, options),
    }


def _field(name: str, field: Field) -> Schema:
    if field.refused is not None:
        return {"enum": [*field.neutral, None], "description": f"It {field.refused}."}
    if field.is_harmless:
        return {"description": "It changes nothing here."}
    schema = field.schema if field.is_required else nullable(field.schema)
    return {**schema, "description": NEEDS[name]} if name in NEEDS else schema


def _post(path: str, name: str, summary: str) -> Schema:
    content: Schema = {JSON: {"schema": OBJECT}}
    if path in STREAMS:
        content[EVENTS] = {"schema": TEXT}
    error = "AnthropicError" if path.startswith(MESSAGES) else "Error"
    body = {"required": True, "content": _content(f"{name}Request")}
    return {"summary": summary, "requestBody": body, "responses": _responses(content, error)}


def _get(path: str, summary: str, kind: str | None) -> Schema:
    content: Schema = {} if kind is None else {kind: {"schema": OBJECT if kind == JSON else TEXT}}
    found: Schema = {"summary": summary, "responses": _responses(content, "Error")}
    return {**found, "parameters": [NAME]} if "{name}" in path else found


def _responses(content: Schema, error: str) -> Schema:
    found: Schema = {"200": {"description": "The answer.", "content": content}}
    if not content:  # of a route that tells by its status whether the server is well
        found["503"] = {"description": "Requests would fail."}
    return {**found, "default": {"description": "An error.", "content": _content(error)}}


def _content(name: str) -> Schema:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def page(options: ServerOptions) -> str:
    """Write the page. It says what /openapi.json says of requests."""
    lines = [HEAD, _paragraph(f"{ABOUT} The same as OpenAPI 3.1 is at /openapi.json.")]
    for path, (_, summary) in POSTS.items():
        unknown = "ignored" if takes_more(path, options) else "refused"
        lines += [f"<h2>POST {path}</h2>\n", _paragraph(summary)]
        lines += ["<table>\n<tr><th>Field</th><th>Value</th><th>Effect</th></tr>\n"]
        lines += [_row(name, field) for name, field in FIELDS[path].items()]
        lines += ["</table>\n", _paragraph(f"Unknown fields are {unknown}.")]
    for path, (summary, _) in GETS.items():
        lines += [f"<h2>GET {escape(path)}</h2>\n", _paragraph(summary)]
    return "".join([*lines, "</body>\n</html>\n"])


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def _row(name: str, field: Field) -> str:
    value, effect = words(field.schema), NEEDS.get(name, "works")
    if field.refused is not None:
        value = " or ".join(map(json.dumps, field.neutral)) or "none"
        effect = field.refused
    elif field.is_harmless:
        effect = "changes nothing here"
    elif field.is_required:
        effect = "is required"
    cells = f"<td>{escape(value)}</td><td>{escape(effect)}</td>"
    return f"<tr><th><code>{escape(name)}</code></th>{cells}</tr>\n"


def words(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(map(json.dumps, cast(list[object], schema["enum"])))
    if "anyOf" in schema:
        return ", or ".join(map(words, cast(list[Schema], schema["anyOf"])))
    match schema.get("type"):
        case "integer" | "number" as kind:
            low, high = schema.get("minimum"), schema.get("maximum")
            least = "" if low is None else f", at least {low}"
            return f"{kind} from {low} to {high}" if high is not None else f"{kind}{least}"
        case "string":
            most = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
            return f"text{most}"
        case "array":
            most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
            return f"list of ({words(cast(Schema, schema['items']))}){most}"
        case "object":
            names = ", ".join(cast(Schema, schema.get("properties", {})))
            return f"object of {names}" if names else "object"
        case "boolean":
            return "true or false"
    return "anything"
