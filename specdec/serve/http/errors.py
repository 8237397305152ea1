"""What a request is answered when it fails: an HTTP status and OpenAI's form of an error."""

import json
import re
from collections.abc import Mapping

from starlette.responses import Response

from weights.errors import shown

LONGEST_MESSAGE = 600  # characters; a message repeats what was given
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}
SHUTTING_DOWN = "the server is shutting down"


class ApiError(Exception):
    """param: the field that is wrong; by default the one that the message begins with."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shown(message, LONGEST_MESSAGE)
        named = re.match(r"(\w+)(=|\[|:)", message)
        self.param = param or (named[1] if named else None)
        self.code = code

    def body(self) -> dict[str, object]:
        """OpenAI's form."""
        kind = TYPES.get(self.status, "invalid_request_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return json_response(self.body(), self.status, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON."""
    return Response(as_json(value), status, headers, media_type="application/json")


def as_json(value: object) -> bytes:
    """In UTF-8; lone surrogates, which a request may hold, as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
