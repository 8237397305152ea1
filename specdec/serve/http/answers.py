"""Outputs in OpenAI's forms: whole answers, chunks of streams, usage."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from specdec.requests.output import Logprob, RequestOutput
from specdec.serve.http.api_request import ApiRequest
from specdec.serve.http.chat_messages import ChatDeltas, chat_message, finish_reason
from specdec.serve.http.pieces import Piece, best, clamped
from specdec.serve.http.prompts import Encoded
from specdec.serve.http.tools.message_reader import AnswerReading

Json = dict[str, object]


class Form(Protocol):
    """How a route writes choices. position: of a prompt in the request."""

    prefix: str  # of the ids of answers
    name: str
    chunk_name: str

    def choice(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> Json:
        """A choice that is whole."""

    def chunk_choices(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> list[Json]:
        """Parts of a choice in a stream, in order."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What an answer and all its chunks begin with."""

    answer_id: str
    model: str
    created: int

    @staticmethod
    def of(form: Form, api_request: ApiRequest) -> "Heading":
        """With an id of its own, which is none of the engine's."""
        return Heading(f"{form.prefix}-{uuid.uuid4().hex}", api_request.model, int(time.time()))

    def fields(self, name: str) -> Json:
        """name: of the kind of object."""
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
        }


def usage(outputs: Sequence[RequestOutput], api_request: ApiRequest) -> Json:
    """Tokens of all prompts and choices, and of speculation in OpenAI's own fields."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    written = [0 if api_request.writes_nothing else _num_written(output) for output in outputs]
    accepted = sum(output.stats.num_accepted_tokens for output in outputs)
    drafted = sum(output.stats.num_drafted_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": sum(written),
        "total_tokens": num_prompt + sum(written),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _num_written(output: RequestOutput) -> int:
    return sum(len(each.token_ids) for each in output.outputs)


class ChatForm:
    """/v1/chat/completions. reading: of the answers' texts."""

    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._deltas: dict[int, ChatDeltas] = {}

    def choice(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> Json:
        """With the message."""
        message = self._reading.message(piece.text, is_cut=piece.finish_reason == "length")
        reason = finish_reason(piece.finish_reason, bool(message.calls))
        head: Json = {"index": piece.index, "message": chat_message(message)}
        return {**head, **self._rest(api_request, output, piece), "finish_reason": reason}

    def chunk_choices(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> list[Json]:
        """With what the message grows by, a kind of text each. Tokens are in the first one."""
        if piece.index not in self._deltas:
            self._deltas[piece.index] = ChatDeltas(self._reading)
        deltas = self._deltas[piece.index]
        has_tokens = api_request.returns_token_ids or api_request.params.logprobs is not None
        has_tokens = has_tokens or bool(piece.rounds)
        found = deltas.new(piece.text, piece.finish_reason, has_tokens)
        ends: Json = {"finish_reason": None, "stop_reason": None}
        choices: list[Json] = [
            {"index": piece.index, "delta": delta, "logprobs": None, **ends} for delta in found
        ]
        if choices:
            choices[0] |= self._rest(api_request, output, piece) | ends
            reason = finish_reason(piece.finish_reason, deltas.has_calls)
            choices[-1] |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
        return choices

    def _rest(self, api_request: ApiRequest, output: RequestOutput, piece: Piece) -> Json:
        return {
            "logprobs": self._logprobs(api_request, piece),
            "stop_reason": piece.stop_reason,
            **_extras(api_request, output, piece),
        }

    def _logprobs(self, api_request: ApiRequest, piece: Piece) -> Json | None:
        count = api_request.params.logprobs
        if piece.logprobs is None or count is None:
            return None
        pairs = zip(piece.token_ids, piece.logprobs, strict=True)
        content = [
            {**_named(found[token]), "top_logprobs": [_named(each) for each in best(found, count)]}
            for token, found in pairs
        ]
        return {"content": content, "refusal": None}


def _named(found: Logprob) -> Json:
    token = found.decoded_token
    return {"token": token, "logprob": clamped(found.logprob), "bytes": list(token.encode())}


class CompletionForm:
    """/v1/completions. prompts: of the request, for echo; first_tokens: of each, as text."""

    prefix = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, prompts: Sequence[Encoded], first_tokens: Sequence[str]) -> None:
        self._prompts = prompts
        self._first_tokens = first_tokens

    def choice(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> Json:
        """After the prompt, if it was asked for."""
        has_prompt = api_request.echo and piece.is_first
        prompt = (self._prompts[position].text or "") if has_prompt else ""
        shift = len(self._prompts[position].text or "") if api_request.echo else 0
        if api_request.writes_nothing:
            rows = None if piece.logprobs is None else piece.logprobs[:0]
            piece = Piece(piece.index, "", [], rows, 0, "length", None, True)
        extras = _extras(api_request, output, piece)
        return {
            "index": position * api_request.params.n + piece.index,
            "text": prompt + piece.text,
            "logprobs": self._logprobs(api_request, position, output, piece, has_prompt, shift),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **extras,
        }

    def chunk_choices(
        self, api_request: ApiRequest, position: int, output: RequestOutput, piece: Piece
    ) -> list[Json]:
        """A chunk has the form of a whole answer."""
        return [self.choice(api_request, position, output, piece)]

    def _logprobs(
        self,
        api_request: ApiRequest,
        position: int,
        output: RequestOutput,
        piece: Piece,
        has_prompt: bool,
        shift: int,
    ) -> Json | None:
        if piece.logprobs is None:
            return None
        found = _Columns(api_request.params.logprobs or 0)
        if has_prompt:
            text = self._prompts[position].text or ""
            found.add_prompt(output, text, self._first_tokens[position])
        found.add(piece.token_ids, piece.logprobs, shift + piece.offset)
        return found.as_dict()


class _Columns:
    """Logprobs of a completion, a list for each property."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._best: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, output: RequestOutput, text: str, first_token: str) -> None:
        """The first token has no logprob. A special token may not be in the text."""
        rows = output.prompt_logprobs or []
        offset = 0
        for token, found in zip(output.prompt_token_ids, rows, strict=True):
            decoded = first_token if found is None else found[token].decoded_token
            self._tokens.append(decoded)
            self._offsets.append(offset)
            self._values.append(None if found is None else clamped(found[token].logprob))
            self._best.append(None if found is None else self._named(token, found))
            offset += len(decoded) if text.startswith(decoded, offset) else 0

    def add(
        self, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob]], offset: int
    ) -> None:
        """Generated tokens."""
        for token, found in zip(token_ids, rows, strict=True):
            self._tokens.append(found[token].decoded_token)
            self._values.append(clamped(found[token].logprob))
            self._best.append(self._named(token, found))
            self._offsets.append(offset)
            offset += len(found[token].decoded_token)

    def as_dict(self) -> Json:
        """OpenAI's form."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._best,
            "text_offset": self._offsets,
        }

    def _named(self, token: int, found: dict[int, Logprob]) -> dict[str, float]:
        """The best ones, and the token itself."""
        ranked = [*best(found, self._count), found[token]]
        return {each.decoded_token: clamped(each.logprob) for each in ranked}


def _extras(api_request: ApiRequest, output: RequestOutput, piece: Piece) -> Json:
    """Token ids, the prompt's in the first piece, and rounds, where they are asked for."""
    found: Json = {}
    if api_request.returns_token_ids:
        found["token_ids"] = piece.token_ids
        if piece.is_first:
            found["prompt_token_ids"] = output.prompt_token_ids
    if api_request.shows_drafts:
        found["rounds"] = [asdict(each) for each in piece.rounds]
    return found
