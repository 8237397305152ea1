"""Exchanges with a server, checked against its own description."""

import json
import re

import httpx2
from jsonschema import Draft202012Validator

from specdec.serve.http.openapi import document
from specdec.serve.http.options import ServerOptions


class Described:
    """Checks what a client sends and gets. asked: the routes of requests that were answered."""

    def __init__(self, options: ServerOptions) -> None:
        self.document = document(options)
        self.asked: set[str] = set()
        self._paths = {
            re.compile(re.sub(r"\{\w+\}", ".+", path) + "$"): operations
            for path, operations in self.document["paths"].items()
        }

    def hooks(self) -> dict[str, list]:
        """Give the event hooks of a client."""
        return {"response": [self.check]}

    def problems(self, path: str, body: object) -> list[str]:
        """Say what the description finds wrong with a request of POST."""
        content = self.document["paths"][path]["post"]["requestBody"]["content"]
        return self._problems(content["application/json"]["schema"], body)

    def check(self, response: httpx2.Response) -> None:
        """Fail if a request that was answered, or the answer, or an error is not as described."""
        request = response.request
        found = [each for pattern, each in self._paths.items() if pattern.match(request.url.path)]
        operation = found[0].get(request.method.lower()) if found else None
        if operation is None:
            return
        is_answer = response.status_code == 200
        if is_answer and request.method == "POST":
            self.asked.add(request.url.path)
            problems = self.problems(request.url.path, json.loads(request.read()))
            assert not problems, (request.url.path, problems)
        kind = response.headers.get("content-type", "").partition(";")[0]
        responses = operation["responses"]
        described = responses.get(str(response.status_code), responses["default"])
        expected = described.get("content", {})
        assert kind in (expected or [""]), (request.url.path, kind)
        if kind == "application/json":
            problems = self._problems(expected[kind]["schema"], json.loads(response.read()))
            assert not problems, (request.url.path, problems)

    def _problems(self, schema: object, value: object) -> list[str]:
        whole = {**schema, "components": self.document["components"]}
        errors = Draft202012Validator(whole).iter_errors(value)
        return [f"{each.json_path}: {each.message:.300}" for each in errors]
