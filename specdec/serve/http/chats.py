"""A chat request made ready: its sampling, its prompt, its grammar, and how its answer is read.

Every route of conversations translates its body to the fields of /v1/chat/completions and comes
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec.requests import bounded_json
from specdec.requests.json_schemas import SchemaError
from specdec.requests.params import SamplingParams
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.serve.async_engine import AsyncEngine
from specdec.serve.http.agents.answer_reading import (
    END_THINK,
    THINK,
    AnswerFormat,
    AnswerReading,
    answer_format,
    answer_grammar,
)
from specdec.serve.http.agents.tool_use import (
    Schema,
    ToolUse,
    tool_use,
    with_names,
    with_parameters,
)
from specdec.serve.http.api_request import (
    GRAMMARS_BUSY,
    ApiRequest,
    chat_request,
    check_grammar,
    grammar_field,
)
from specdec.serve.http.errors import ApiError
from specdec.serve.http.fields import EFFORTS
from specdec.serve.http.options import ServerOptions
from specdec.serve.http.prompts import Encoded, Prompts

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Holds what an answer is generated from, and how its text is read."""

    api_request: ApiRequest
    prompt: Encoded
    reading: AnswerReading


class Chats:
    """Makes chat requests ready. defaults: the sampling of requests that do not say."""

    def __init__(
        self,
        llm: AsyncEngine,
        prompts: Prompts,
        options: ServerOptions,
        defaults: Mapping[str, object],
    ) -> None:
        self._llm = llm
        self._prompts = prompts
        self._options = options
        self._defaults = defaults
        self._special = frozenset[str](prompts.tokenizer.backend.all_special_tokens)

    async def turn(self, body: Body) -> ChatTurn:
        """Read known fields of /v1/chat/completions; ApiError names one that is wrong."""
        form = self._answer_format(body)
        use = self._tool_use(body, form)
        calls = form.calls if use.possible else None
        # tags that are special tokens are read from the text, so it must have them
        tags = set(() if calls is None else calls.tags)
        tags |= {THINK, END_THINK} if form.thinks else set()
        special = {"skip_special_tokens": False} if tags & self._special else {}
        body = {**special, **self._for_template(body, use)}
        api_request = chat_request(body, self._options, self._defaults)
        prompt = await self._prompts.chat(body)
        text = (prompt.text or "").rstrip()
        thinks = form.thinks and not text.endswith(END_THINK)
        reading = AnswerReading(calls, use, thinks, is_open=text.endswith(THINK))
        reading, params = self._guided(body, api_request.params, reading)
        await self._check_grammar(body, params, use)
        return ChatTurn(replace(api_request, params=params), prompt, reading)

    def _for_template(self, body: Body, use: ToolUse) -> dict[str, object]:
        """Add what the template is given: tools that may be called, names, the effort."""
        found = {name: value for name, value in body.items() if name != "tools"}
        found["messages"] = with_names(body.get("messages"))
        if use.possible:
            found["tools"] = with_parameters(body["tools"])
        if "reasoning_effort" in body:
            given = body.get("chat_template_kwargs", {})
            if isinstance(given, dict):  # anything else is refused later
                found["chat_template_kwargs"] = {**self._effort(body), **given}
        return found

    @property
    def format(self) -> AnswerFormat:
        return self._answer_format({})

    def knows(self, name: str) -> bool:
        """Say whether the server's chat template reads a variable."""
        return name in self._template({})

    def _template(self, body: Body) -> str:
        return str(body.get("chat_template") or self._prompts.template)

    def _answer_format(self, body: Body) -> AnswerFormat:
        parsers = self._options.tool_call_parser, self._options.reasoning_parser
        return answer_format(self._template(body), *parsers)

    def _effort(self, body: Body) -> dict[str, object]:
        effort = body["reasoning_effort"]
        if effort not in EFFORTS:
            raise ApiError(400, f"reasoning_effort={effort!r}: allowed are {', '.join(EFFORTS)}")
        template = self._template(body)
        if "reasoning_effort" in template:
            return {"reasoning_effort": effort}
        if "enable_thinking" in template:
            return {"enable_thinking": effort != "none"}
        reason = "the chat template reads neither reasoning_effort nor enable_thinking"
        raise ApiError(400, f"reasoning_effort: no effect, since {reason}")

    def _tool_use(self, body: Body, form: AnswerFormat) -> ToolUse:
        try:
            use = tool_use(body)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if use.possible and not form.knows_tools:
            raise ApiError(400, "tools: the chat template of this model knows no tools")
        if use.possible and form.calls is None:
            reason = "calls of this model cannot be read"
            raise ApiError(400, f"tools: {reason}; the server needs a --tool-call-parser that does")
        return use

    def _guided(
        self, body: Body, params: SamplingParams, reading: AnswerReading
    ) -> tuple[AnswerReading, SamplingParams]:
        """Add a grammar of the calls that must be written, or of the answer after the reasoning.

        Another grammar of the request's own begins with the first token of the answer, so there
        is no reasoning to be read.
        """
        use = reading.use
        schema = _schema(params)
        name = grammar_field(body)
        if use.choice == "required" and name is not None:
            raise ApiError(400, f"{name}: an answer that must be a call has no text", name)
        is_alike = reading.calls is not None and not reading.calls.tags
        if name is not None and (schema is None or is_alike):
            if use.possible:
                raise ApiError(400, f"{name} and tools: give one, or tool_choice none", name)
            return replace(reading, thinks=False), params
        if use.choice != "required" and (schema is None or not (use.possible or reading.thinks)):
            return reading, params
        try:
            grammar = answer_grammar(self._special, reading, schema)
            guided = StructuredOutputsParams(grammar=grammar)
            return reading, replace(params, structured_outputs=guided)
        except SchemaError as error:
            raise ApiError(400, f"{name}: json: {error}", name) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def _check_grammar(self, body: Body, params: SamplingParams, use: ToolUse) -> None:
        """ApiError names the field, and the first tool whose schema alone is bad."""
        try:
            await check_grammar(self._llm, params, grammar_field(body) or "tools")
        except ApiError as error:
            if error.code == GRAMMARS_BUSY:
                raise
            for tool in use.possible:
                alone = SamplingParams(structured_outputs={"json": tool.parameters})
                await check_grammar(self._llm, alone, use.place(tool))
            raise


def _schema(params: SamplingParams) -> Schema | None:
    """Return the JSON schema that an answer must follow, if it must."""
    if params.structured_outputs is None:
        return None
    kind, text = StructuredOutputsParams.of(params.structured_outputs).source()
    if kind != "json":
        return None
    try:
        schema = bounded_json.loads(text)
    except ValueError:  # the compiler says why
        return None
    return schema if isinstance(schema, dict) else None
