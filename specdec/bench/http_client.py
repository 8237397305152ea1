"""A client of OpenAI's API that notes when each part of an answer arrives."""

import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass(slots=True, kw_only=True)
class Timing:
    """When one request's answer came, in seconds of the client's clock; error: why none came."""

    sent: float
    deliveries: list[float] = field(default_factory=list)  # of text; at least the end
    ended: float = 0.0
    is_finished: bool = False
    num_tokens: int = 0
    error: str | None = None

    def measures(self) -> dict[str, list[float]]:
        """Give seconds by measure; one token has no time per token, one delivery no gap."""
        first, last = self.deliveries[0], self.deliveries[-1]
        later = self.num_tokens - 1
        return {
            "ttft": [first - self.sent],
            "tpot": [(last - first) / later] if later > 0 else [],
            "itl": [b - a for a, b in itertools.pairwise(self.deliveries)],
            "e2e": [self.ended - self.sent],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """url: up to /v1. model: None for the first one listed. fields: of every request."""

    url: str
    model: str | None
    is_chat: bool
    api_key: str | None
    fields: dict[str, object]

    @property
    def path(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"

    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        """Make a request for an answer in one piece."""
        messages = [{"role": "user", "content": prompt}]
        asked = {"messages": messages} if self.is_chat else {"prompt": prompt}
        return {"model": self.model, "max_tokens": max_tokens, **asked, **self.fields}


async def listed_models(client: httpx2.AsyncClient, api: Api) -> dict[str, dict[str, object]]:
    """Ask /v1/models, by id; ValueError if there is no such server."""
    data = (await _checked(client, "GET", f"{api.url}/v1/models", api)).get("data")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{api.url}/v1/models lists no model")
    return {str(each.get("id")): each for each in data}


async def num_tokens(client: httpx2.AsyncClient, api: Api, prompt: str) -> int:
    """Ask how many tokens a prompt has, by the usage that the server reports."""
    usage = (await _checked(client, "POST", api.path, api, api.body(prompt, 1))).get("usage")
    found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(found, int):
        raise ValueError(f"{api.path}: an answer without usage.prompt_tokens")
    return found


async def timed(client: httpx2.AsyncClient, api: Api, prompt: str, max_tokens: int) -> Timing:
    """Send a request and read its stream."""
    body = api.body(prompt, max_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    timing = Timing(sent=time.perf_counter())
    try:
        async for event in _events(client, api, body):
            _take(timing, event)
    except (httpx2.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter()
    if timing.error is None and not timing.is_finished:
        timing.error = "the stream ended before the answer"
    timing.deliveries = timing.deliveries or [timing.ended]
    return timing


def _take(timing: Timing, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    try:
        if event.get("usage"):
            timing.num_tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                timing.deliveries.append(time.perf_counter())
            timing.is_finished |= choice.get("finish_reason") is not None
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"an event that is not OpenAI's: {json.dumps(event):.200}") from error


async def _events(
    client: httpx2.AsyncClient, api: Api, body: dict[str, object]
) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", api.path, json=body, headers=api.headers()) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ValueError(f"status {response.status_code}: {text:.200}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield json.loads(data)


async def _checked(
    client: httpx2.AsyncClient, method: str, url: str, api: Api, body: object = None
) -> dict[str, object]:
    """Read the JSON of an answer; ValueError if there is none."""
    try:
        response = await client.request(method, url, json=body, headers=api.headers())
        found = response.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"{url}: {str(error) or type(error).__name__}") from error
    if response.status_code != 200 or not isinstance(found, dict):
        raise ValueError(f"{url}: status {response.status_code}: {response.text:.200}")
    return found
