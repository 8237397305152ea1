"""POST /v1/responses, /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specdec.serve.http.agents import messages_input, responses_input
from specdec.serve.http.agents.event_answer import EventAnswer, Script
from specdec.serve.http.agents.messages_events import MessagesScript
from specdec.serve.http.agents.responses_events import ResponsesScript
from specdec.serve.http.agents.translation import Announced, Json, Knows, Translation
from specdec.serve.http.api_request import ApiRequest
from specdec.serve.http.bodies import Bodies, Body
from specdec.serve.http.chats import Chats, ChatTurn
from specdec.serve.http.errors import MESSAGES, ApiError, json_response
from specdec.serve.http.fields import COUNT_TOKENS, RESPONSES
from specdec.serve.http.generating import Services

Translate = Callable[[Body, Knows], Translation]
NewScript = Callable[[Body, ApiRequest], Script]


class AgentRoutes:
    """Translates a request to a chat request and writes its answer in the route's own form.

    An agent asks for as many tokens as its own model may write, so its limit is cut to the context.
    """

    def __init__(self, services: Services, chats: Chats, bodies: Bodies) -> None:
        self._services = services
        self._chats = chats
        self._bodies = bodies
        self._announced = Announced()

    def routes(self) -> list[Route]:
        """List the routes, for the application."""
        return [
            Route(RESPONSES, self.responses, methods=["POST"]),
            Route(MESSAGES, self.messages, methods=["POST"]),
            Route(COUNT_TOKENS, self.count_tokens, methods=["POST"]),
        ]

    async def responses(self, request: Request) -> Response:
        """Answer POST /v1/responses."""
        body, translation = await self._read(request, responses_input.translated)
        return await self._answer(request, body, translation, _responses_script)

    async def messages(self, request: Request) -> Response:
        """Answer POST /v1/messages."""
        body, translation = await self._read(request, messages_input.translated)
        return await self._answer(request, body, translation, _messages_script)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that the same message would have."""
        translate = partial(messages_input.translated, is_count=True)
        _, translation = await self._read(request, translate)
        turn = await self._turn(request, translation)
        count = {"input_tokens": len(turn.prompt.token_ids)}
        return json_response(count, headers=translation.headers())

    async def _read(self, request: Request, translate: Translate) -> tuple[Body, Translation]:
        def read(body: Body) -> tuple[Body, Translation]:
            return body, translate(body, self._chats.knows)

        return await self._bodies.read(request, read)

    async def _answer(
        self, request: Request, body: Body, translation: Translation, new_script: NewScript
    ) -> Response:
        turn = await self._turn(request, translation)
        script = new_script(body, turn.api_request)
        return EventAnswer(self._services, turn, script, translation.headers())

    async def _turn(self, request: Request, translation: Translation) -> ChatTurn:
        self._announced.see(request.url.path, translation.ignored)
        try:
            return await self._chats.turn(translation.body)
        except ApiError as error:
            raise translation.renamed(error) from error


def _responses_script(body: Body, api_request: ApiRequest) -> Script:
    params = api_request.params
    sampling: Json = {"temperature": params.temperature, "top_p": params.top_p}
    return ResponsesScript(body, api_request.model, sampling)


def _messages_script(body: Body, api_request: ApiRequest) -> Script:
    return MessagesScript(api_request.model)
