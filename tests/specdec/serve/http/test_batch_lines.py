"""What a line of a batch becomes by the application's status."""

import asyncio
import json

import pytest

from specdec.serve.http import batch
from specdec.serve.http.api_request import GRAMMARS_BUSY
from specdec.serve.http.errors import ApiError

LINE = batch.BatchLine("a", "/v1/completions", b"{}")
BUSY = ApiError(503, "no new grammar is taken", "guided_regex", GRAMMARS_BUSY)
ENDED = ApiError(503, "the engine has failed")


def answered(*errors):
    """By an application that gives these errors in turn, and then an answer."""
    waiting = list(errors)

    async def app(scope, receive, send):
        status, body = 200, {"usage": {"completion_tokens": 7}}
        if waiting:
            error = waiting.pop(0)
            status, body = error.status, error.body()
        headers = [(b"x-request-id", b"one")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    return asyncio.run(batch.answer_line(app, LINE)), waiting


def test_a_line_is_tried_again_while_no_new_grammar_is_taken(monkeypatch):
    monkeypatch.setattr(batch, "BUSY_SECONDS", 0.001)
    found, waiting = answered(BUSY, BUSY)
    assert (found.num_tokens, waiting) == (7, [])
    assert json.loads(found.line)["response"]["status_code"] == 200


@pytest.mark.parametrize("before", [[], [BUSY]])
def test_an_engine_that_has_ended_stops_the_batch(monkeypatch, before):
    monkeypatch.setattr(batch, "BUSY_SECONDS", 0.001)
    with pytest.raises(batch.BatchStopped, match="the engine has failed"):
        answered(*before, ENDED)
