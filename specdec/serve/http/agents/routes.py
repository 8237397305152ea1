"""POST /v1/responses, /v1/messages and /v1/messages/count_tokens."""

import logging
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.serve.http.agents import anthropic_messages, openai_responses
from specdec.serve.http.agents.event_answer import EventAnswer
from specdec.serve.http.agents.translation import Knows, Translation
from specdec.serve.http.bodies import Bodies, Body
from specdec.serve.http.chats import Chats, ChatTurn
from specdec.serve.http.errors import MESSAGES, ApiError, json_response
from specdec.serve.http.fields import COUNT_TOKENS, RESPONSES
from specdec.serve.http.generating import Services

logger = logging.getLogger("specdec.serve")

MOST_LOGGED = 1000  # ignored names, of all requests


class AgentRoutes:
    """Translates a request to a chat request and writes its answer in the route's own form."""

    def __init__(self, services: Services, chats: Chats, bodies: Bodies) -> None:
        self._services = services
        self._chats = chats
        self._bodies = bodies
        self._logged: set[str] = set()

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSES, self.responses, methods=["POST"]),
            Route(MESSAGES, self.messages, methods=["POST"]),
            Route(COUNT_TOKENS, self.count_tokens, methods=["POST"]),
        ]

    async def responses(self, request: Request) -> Response:
        body, turn, headers = await self._turn(request, openai_responses.translated)
        params = turn.api_request.params
        sampling: dict[str, object] = {"temperature": params.temperature, "top_p": params.top_p}
        script = openai_responses.ResponsesScript(body, turn.api_request.model, sampling)
        return EventAnswer(self._services, turn, script, headers)

    async def messages(self, request: Request) -> Response:
        _, turn, headers = await self._turn(request, anthropic_messages.translated)
        script = anthropic_messages.MessagesScript(turn.api_request.model)
        return EventAnswer(self._services, turn, script, headers)

    async def count_tokens(self, request: Request) -> Response:
        translate = partial(anthropic_messages.translated, is_count=True)
        _, turn, headers = await self._turn(request, translate)
        return json_response({"input_tokens": len(turn.prompt.token_ids)}, headers=headers)

    async def _turn(
        self, request: Request, translate: Callable[[Body, Knows], Translation]
    ) -> tuple[Body, ChatTurn, dict[str, str]]:
        """Return the body, its chat request, and headers of its answer."""

        def read(body: Body) -> tuple[Body, Translation]:
            return body, translate(body, self._chats.knows)

        body, found = await self._bodies.read(request, read)
        new = [name for name in found.ignored if name not in self._logged]
        if new and len(self._logged) < MOST_LOGGED:
            self._logged.update(new)
            path = request.url.path
            logger.info("%s: ignored %s (each is named once)", path, ", ".join(new))
        try:
            return body, await self._chats.turn(found.body), found.headers()
        except ApiError as error:
            raise found.renamed(error) from error
