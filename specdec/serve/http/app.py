"""The application: every route, and what it answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

import specdec
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineDeadError, EngineFacts
from specdec.serve.http.agents.routes import AgentRoutes
from specdec.serve.http.agents.translation import IGNORED_HEADER
from specdec.serve.http.answers import ChatForm, CompletionForm
from specdec.serve.http.api_request import (
    check_grammar,
    check_model,
    check_room,
    completion_request,
    grammar_field,
)
from specdec.serve.http.bodies import Bodies
from specdec.serve.http.chats import Chats
from specdec.serve.http.errors import ApiError, json_response
from specdec.serve.http.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, known_fields
from specdec.serve.http.gate import FOLDER, PAGE_PATHS, Gate, Traffic
from specdec.serve.http.generating import Answer, Services
from specdec.serve.http.measures import Measures, Monitor, Record
from specdec.serve.http.openapi import document, page
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.prompts import Prompts

METHODS = ("GET", "HEAD", "OPTIONS")
FILES = StaticFiles(directory=FOLDER)
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Application:
    """Routes requests to one engine. `app` is what a server runs."""

    def __init__(self, llm: AsyncEngine, options: ServerOptions) -> None:
        facts = llm.facts
        self.traffic = Traffic(facts.max_num_seqs + options.max_waiting)
        self._llm = llm
        self._options = options
        self._max_model_len = facts.max_model_len
        self._speculation = _speculation(facts)
        self._created = int(time.time())
        # the engine has one of its own
        tokenizer = Tokenizer(facts.tokenizer)
        self._prompts = Prompts(tokenizer, facts.max_model_len, options)
        self._measures = Measures(options.model_names[0])
        record = None if options.record is None else Record(options.record)
        self._services = Services(llm, self.traffic, self._measures, record, tokenizer)
        self.defaults: Mapping[str, object] = {}  # of sampling: what the checkpoint recommends
        if options.use_generation_config:
            self.defaults = {name: getattr(facts.recommended, name) for name in RECOMMENDED}
        self.chats = Chats(llm, self._prompts, options, self.defaults)
        self._bodies = Bodies()
        self.app = self._build()

    def _build(self) -> Starlette:
        middleware = [Middleware(Gate, options=self._options, traffic=self.traffic)]
        if self._options.allowed_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=self._options.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # the clients of both vendors send many of their own
                expose_headers=["X-Request-Id", IGNORED_HEADER],
            )
            middleware.insert(0, cors)
        kinds = (ApiError, EngineDeadError, HTTPException, Exception)
        return Starlette(
            routes=self._routes(),
            middleware=middleware,
            exception_handlers=dict.fromkeys(kinds, _answer_error),
            lifespan=self._lifespan,
        )

    def _routes(self) -> list[Route]:
        return [
            Route(CHAT, self._chat, methods=["POST"]),
            Route(COMPLETION, self._completions, methods=["POST"]),
            *AgentRoutes(self._services, self.chats, self._bodies).routes(),
            Route(TOKENIZE, self._tokenize, methods=["POST"]),
            Route(DETOKENIZE, self._detokenize, methods=["POST"]),
            Route("/health", self._health, methods=METHODS),
            Route("/ping", self._health, methods=[*METHODS, "POST"]),
            get_route("/v1/models", self._list_models),
            get_route("/v1/models/{name:path}", self._show_model),
            get_route("/version", self._version),
            get_route("/metrics", self._metrics),
            get_route("/openapi.json", self._openapi),
            get_route("/docs", self._docs),
            *(get_route(path, _page_file) for path in sorted(PAGE_PATHS)),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(Monitor(self._llm).run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            self._prompts.close()
            if self._services.record is not None:
                self._services.record.close()

    async def _chat(self, request: Request) -> Response:
        turn = await self.chats.turn(await self._body(request, CHAT))
        length = len(turn.prompt.token_ids)
        check_room(turn.api_request, [length], self._max_model_len, "messages")
        form = ChatForm(turn.api_request, turn.reading, self._prompts.tokenizer.token_bytes)
        return Answer(self._services, turn.api_request, [turn.prompt], form)

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request, COMPLETION)
        api_request = completion_request(body, self._options, self.defaults)
        await check_grammar(self._llm, api_request.params, grammar_field(body))
        if "prompt" not in body:
            raise ApiError(400, "prompt is missing", "prompt")
        adds_special = bool(body.get("add_special_tokens", True))
        prompts = await self._prompts.completion(body["prompt"], api_request.params.n, adds_special)
        lengths = [len(each.token_ids) for each in prompts]
        check_room(api_request, lengths, self._max_model_len, "prompt")
        shown = [await self._prompts.with_text(each) for each in prompts if api_request.echo]
        form = CompletionForm(api_request, shown, self._prompts.tokenizer.token_bytes)
        return Answer(self._services, api_request, prompts, form)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request, TOKENIZE)
        check_model(body.get("model", self._options.model_names[0]), self._options)
        ids = (await self._prompts.tokenize(body)).token_ids
        found: dict[str, object] = {"count": len(ids), "max_model_len": self._max_model_len}
        found["tokens"] = ids
        if body.get("return_token_strs"):
            found["token_strs"] = self._prompts.tokenizer.backend.convert_ids_to_tokens(ids)
        return json_response(found)

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, DETOKENIZE)
        check_model(body.get("model", self._options.model_names[0]), self._options)
        return json_response({"prompt": await self._prompts.decode(body.get("tokens"))})

    async def _body(self, request: Request, route: str) -> dict[str, object]:
        ignore = (lambda name: None) if self._options.ignore_unknown else None
        return await self._bodies.read(request, partial(known_fields, route, ignore=ignore))

    async def _list_models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._options.model_names]
        return json_response({"object": "list", "data": data})

    async def _show_model(self, request: Request) -> Response:
        return json_response(self._model(check_model(request.path_params["name"], self._options)))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "root": self._options.model_names[0],
            "parent": None,
            "max_model_len": self._max_model_len,
            "is_chat_model": self._prompts.tells_roles_apart,
            "speculation": self._speculation,
        }

    async def _health(self, request: Request) -> Response:
        is_well = self._llm.is_well and not self.traffic.is_draining
        return Response(status_code=200 if is_well else 503)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": specdec.__version__})

    async def _openapi(self, request: Request) -> Response:
        return json_response(document(self._options))

    async def _docs(self, request: Request) -> Response:
        return Response(page(self._options), media_type="text/html")

    async def _metrics(self, request: Request) -> Response:
        text = self._measures.text(await self._llm.get_metrics())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def get_route(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    """Route a path for GET, HEAD and OPTIONS, by which some load balancers check a server."""

    async def answer(request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(headers={"Allow": ", ".join(METHODS)})
        return await handler(request)

    return Route(path, answer, methods=METHODS)


async def _page_file(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2] or "index.html"
    response = await FILES.get_response(name, request.scope)
    # a browser asks whether its copy is current, so that all files are of one version
    response.headers["Cache-Control"] = "no-cache"
    return response


def _speculation(facts: EngineFacts) -> dict[str, object] | None:
    """Tell the page at / what drafts; None: nothing does."""
    if facts.draft is None or facts.num_speculative_tokens == 0:
        return None
    return {
        "draft": facts.draft,
        "num_speculative_tokens": facts.num_speculative_tokens,
        "is_adaptive": facts.is_adaptive,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, ApiError):
        return error.response(path)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error)).response(path)
    if isinstance(error, HTTPException):
        what = f"{request.method} {path}"
        answer = ApiError(error.status_code, f"{error.detail}: {what}").response(path)
        if error.headers and "Allow" in error.headers:  # in an order that is always the same
            answer.headers["Allow"] = ", ".join(sorted(error.headers["Allow"].split(", ")))
        return answer
    answer = ApiError(500, "an error in the server; its log has the traceback").response(path)
    # the traceback goes on to uvicorn, which ends the connection: no client may send more there
    answer.headers["Connection"] = "close"
    return answer
