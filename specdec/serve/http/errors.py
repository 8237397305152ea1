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
BOTH = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
TYPES = {**BOTH, 500: "internal_server_error", 503: "service_unavailable_error"}
ANTHROPIC_TYPES = {**BOTH, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
MESSAGES = "/v1/messages"
TOO_LONG = "context_length_exceeded"  # code of what does not fit; clients shorten it and retry
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
SHUTTING_DOWN = "the server is shutting down"


class ApiError(Exception):
    """Is what a request gets. param: the wrong field; by default what the message begins with."""

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
        kind = TYPES.get(self.status, "invalid_request_error")
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}

    def anthropic_body(self) -> dict[str, object]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """Return the whole answer, in the form of the route with this path."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
        body = self.anthropic_body() if is_anthropic else self.body()
        return json_response(body, self.status, headers)


class ContextError(ApiError):
    """Says that a prompt does not fit, or not with its answer, in the words that clients know.

    what: the prompt is of. num_output: tokens that the answer may have, if they are too many.
    is_least: the prompt has that many tokens or more. param: what, if it is not given.
    """

    def __init__(
        self,
        max_model_len: int,
        num_prompt: int,
        what: str,
        *,
        num_output: int | None = None,
        is_least: bool = False,
        param: str | None = None,
    ) -> None:
        count = f"at least {num_prompt}" if is_least else str(num_prompt)
        if num_output is None:
            found = f"your {what} resulted in {count} tokens, and an answer needs at least 1 more"
            advice = f"Please reduce the length of the {what}."
        else:
            parts = f"{count} in the {what}, {num_output} in the completion"
            found = f"you requested {num_prompt + num_output} tokens ({parts})"
            advice = f"Please reduce the length of the {what} or completion."
        limit = f"This model's maximum context length is {max_model_len} tokens."
        # some clients read the message alone, and know the code in it
        message = f"{limit} However, {found}. {advice} ({TOO_LONG})"
        super().__init__(400, message, param or what, TOO_LONG)
        self._anthropic = f"prompt is too long: {count} tokens > {max_model_len - 1} maximum"

    def anthropic_body(self) -> dict[str, object]:
        inner = {"type": "invalid_request_error", "message": self._anthropic}
        return {"type": "error", "error": inner}


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def as_json(value: object) -> bytes:
    """Write UTF-8; lone surrogates, which a request may hold, become escapes."""
    return ENCODER.encode(value).encode("utf-8", "backslashreplace")
