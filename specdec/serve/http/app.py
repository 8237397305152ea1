"""The application: every route, and what it answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

import specdec
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.engine_thread import EngineDeadError, EngineFacts
from specdec.serve.http.agents.routes import AgentRoutes
from specdec.serve.http.agents.translation import IGNORED_HEADER
from specdec.serve.http.answers import ChatForm, CompletionForm
from specdec.serve.http.api_request import (
    RECOMMENDED,
    ApiRequest,
    boolean,
    check_model,
    check_room,
    completion_request,
    model_name,
)
from specdec.serve.http.bodies import Bodies
from specdec.serve.http.chats import Chats
from specdec.serve.http.docs import page
from specdec.serve.http.errors import ApiError, json_response
from specdec.serve.http.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, known_fields
from specdec.serve.http.gate import Gate
from specdec.serve.http.generating import Answer, Services
from specdec.serve.http.measures import Measures
from specdec.serve.http.monitor import Monitor
from specdec.serve.http.openapi import document
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.playground import PageFiles, get_route, playground
from specdec.serve.http.prompts import Encoded, Prompts
from specdec.serve.http.record import Record
from specdec.serve.http.structured import check_grammar, grammar_field
from specdec.serve.http.traffic import Traffic


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
        self.measures = Measures(options.model_names[0])
        record = None if options.record is None else Record(options.record)
        self._services = Services(llm, self.traffic, self.measures, record, tokenizer)
        self.defaults = recommended(llm) if options.use_generation_config else {}
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

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            *AgentRoutes(self._services, self.chats, self._bodies).routes(),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET", "HEAD", "OPTIONS"]),
            Route("/ping", self.health, methods=["GET", "HEAD", "OPTIONS", "POST"]),
            get_route("/v1/models", self.models),
            get_route("/v1/models/{name:path}", self.model),
            get_route("/version", self.version),
            get_route("/metrics", self.metrics),
            get_route("/openapi.json", self.openapi),
            get_route("/docs", self.docs),
            get_route("/", playground),
            Mount("/page", PageFiles()),
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

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        body = await self._body(request, CHAT)
        turn = await self.chats.turn(body)
        length = len(turn.prompt.token_ids)
        check_room(turn.api_request, [length], self._max_model_len, "messages")
        form = ChatForm(turn.reading, self._prompts.tokenizer.token_bytes)
        return Answer(self._services, turn.api_request, [turn.prompt], form)

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        body = await self._body(request, COMPLETION)
        api_request = completion_request(body, self._options, self.defaults)
        await check_grammar(self._llm, api_request.params, grammar_field(body))
        if "prompt" not in body:
            raise ApiError(400, "prompt is missing", "prompt")
        adds_special = boolean(body, "add_special_tokens", True)
        prompts = await self._prompts.completion(body["prompt"], api_request.params.n, adds_special)
        lengths = [len(each.token_ids) for each in prompts]
        check_room(api_request, lengths, self._max_model_len, "prompt")
        form = await self._completion_form(api_request, prompts)
        return Answer(self._services, api_request, prompts, form)

    async def _completion_form(
        self, api_request: ApiRequest, prompts: list[Encoded]
    ) -> CompletionForm:
        """Make the form, with the text that echo repeats."""
        token_bytes = self._prompts.tokenizer.token_bytes
        if not api_request.echo:
            return CompletionForm(prompts, token_bytes)
        texts = [
            await self._prompts.decode(each.token_ids) if each.text is None else each.text
            for each in prompts
        ]
        shown = [Encoded(text, each.token_ids) for text, each in zip(texts, prompts, strict=True)]
        return CompletionForm(shown, token_bytes)

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        data = [self._model(name) for name in self._options.model_names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/{id}."""
        name = str(request.path_params["name"])
        check_model(name, self._options)
        return json_response(self._model(name))

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

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize with the token ids of a prompt or a conversation."""
        body = await self._body(request, TOKENIZE)
        ids = (await self._prompts.tokenize(body)).token_ids
        found: dict[str, object] = {
            "count": len(ids),
            "max_model_len": self._max_model_len,
            "tokens": ids,
        }
        if boolean(body, "return_token_strs"):
            found["token_strs"] = self._prompts.tokenizer.backend.convert_ids_to_tokens(ids)
        return json_response(found)

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize with the text of token ids."""
        body = await self._body(request, DETOKENIZE)
        return json_response({"prompt": await self._prompts.decode(body.get("tokens"))})

    async def health(self, request: Request) -> Response:
        """Answer /health and /ping: 503 if requests would fail."""
        if self.traffic.is_draining or not self._llm.is_well:
            return Response(status_code=503)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """Answer GET /version."""
        return json_response({"version": specdec.__version__})

    async def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json."""
        return json_response(document(self._options))

    async def docs(self, request: Request) -> Response:
        """Answer GET /docs."""
        return Response(page(self._options), media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics, for Prometheus."""
        text = self.measures.text(await self._llm.get_metrics())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request, kind: str) -> dict[str, object]:
        ignore = _drop if self._options.ignore_unknown else None
        body = await self._bodies.read(request, partial(known_fields, kind, ignore=ignore))
        if kind in (TOKENIZE, DETOKENIZE):
            model_name(body, self._options)
        return body


def _drop(name: str) -> None:
    """Ignore an unknown field."""


def recommended(llm: AsyncEngine) -> Mapping[str, object]:
    """Return the sampling that the checkpoint recommends."""
    return {name: getattr(llm.facts.recommended, name) for name in RECOMMENDED}


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
