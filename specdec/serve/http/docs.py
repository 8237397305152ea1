"""/docs: the table of fields as a page without scripts, for people."""

import json
from collections.abc import Mapping
from html import escape
from typing import cast

from specdec.serve.http.fields import FIELDS, Field
from specdec.serve.http.openapi import ABOUT, GETS, NEEDS, POSTS, takes_more
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.schemas import Schema

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


def page(options: ServerOptions) -> str:
    """Write the page. It says what /openapi.json says of requests."""
    lines = [HEAD, _paragraph(f"{ABOUT} The same as OpenAPI 3.1 is at /openapi.json.")]
    for path, post in POSTS.items():
        unknown = "ignored" if takes_more(path, options) else "refused"
        lines += [f"<h2>POST {path}</h2>\n", _paragraph(post.summary)]
        lines += ["<table>\n<tr><th>Field</th><th>Value</th><th>Effect</th></tr>\n"]
        lines += [_row(name, field) for name, field in FIELDS[path].items()]
        lines += ["</table>\n", _paragraph(f"Unknown fields are {unknown}.")]
    for path, (summary, _, _) in GETS.items():
        lines += [f"<h2>GET {escape(path)}</h2>\n", _paragraph(summary)]
    return "".join([*lines, "</body>\n</html>\n"])


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def _row(name: str, field: Field) -> str:
    cells = [words(field.schema), _effect(name, field)]
    if field.refused is not None:
        cells[0] = " or ".join(map(json.dumps, field.neutral)) or "none"
    shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr><th><code>{escape(name)}</code></th>{shown}</tr>\n"


def _effect(name: str, field: Field) -> str:
    if field.refused is not None:
        return field.refused
    if field.is_harmless:
        return "changes nothing here"
    return "is required" if field.is_required else NEEDS.get(name, "works")


def words(schema: Schema) -> str:
    """Say what a value may be."""
    if "enum" in schema:
        return ", ".join(map(json.dumps, cast(list[object], schema["enum"])))
    if "anyOf" in schema:
        return ", or ".join(map(words, cast(list[Schema], schema["anyOf"])))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema)}"
    if kind == "string":
        most = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
        return f"text{most}"
    if kind == "array":
        items = words(cast(Schema, schema["items"]))
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of ({items}){most}"
    if kind == "object":
        names = ", ".join(cast(Mapping[str, object], schema.get("properties", {})))
        return f"object of {names}" if names else "object"
    return "true or false" if kind == "boolean" else "anything"


def _range(schema: Schema) -> str:
    low, high = (schema.get(name) for name in ("minimum", "maximum"))
    if high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f", at least {low}"
