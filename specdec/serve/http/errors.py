"""What a request is answered when it fails: an HTTP status, and OpenAI's form of an error.

/v1/messages and what is under it have Anthropic's.
"""

import json
import re
from collections.abc import Mapping

from starlette.responses import Response

from weights.errors import shown

LONGEST_MESSAGE = 600  # characters; a message repeats what was given
LONGEST_PARAM = 100
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
MESSAGES = "/v1/messages"
TOO_LONG = "context_length_exceeded"  # code of a prompt that does not fit
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
SHUTTING_DOWN = "the server is shutting down"


class ApiError(Exception):
    """param: the field that is wrong; by default the one that the message begins with."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shown(message, LONGEST_MESSAGE)
        named = re.match(r"(\w{1,100})(=|\[|:)", message)
        param = param or (named[1] if named else None)
        self.param = None if param is None else shown(param, LONGEST_PARAM)
        self.code = code

    def body(self) -> dict[str, object]:
        """OpenAI's form."""
        kind = TYPES.get(self.status, "invalid_request_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    def anthropic_body(self) -> dict[str, object]:
        """Anthropic's form."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def for_anthropic(self) -> "ApiError":
        """A prompt that does not fit is known by its first words, and has another status."""
        if self.code != TOO_LONG:
            return self
        return ApiError(400, f"prompt is too long: {self.message.removeprefix('prompt: ')}")

    def response(self, path: str = "") -> Response:
        """The whole answer, in the form of the route with this path."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
            error = self.for_anthropic()
            return json_response(error.anthropic_body(), error.status, headers)
        return json_response(self.body(), self.status, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON."""
    return Response(as_json(value), status, headers, media_type="application/json")


def as_json(value: object) -> bytes:
    """In UTF-8; lone surrogates, which a request may hold, as escapes."""
    return ENCODER.encode(value).encode("utf-8", "backslashreplace")
