"""Outputs are written in OpenAI's forms: whole answers, chunks of streams, usage."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from specdec.requests.draft_spans import DraftRound
from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.serve.http.agents.answer_reading import AnswerReading
from specdec.serve.http.api_request import ApiRequest
from specdec.serve.http.chat_messages import ChatDeltas, chat_message, finish_reason
from specdec.serve.http.prompts import Encoded

Json = dict[str, object]
TokenBytes = Callable[[int], bytes]

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Part:
    """Describes how one choice has grown: by the piece `new`.

    position: of the prompt in the request. output: of the prompt, so far. rounds: what was drafted,
    if the request asks for it; a round comes once its text is certain.
    """

    position: int
    output: RequestOutput
    new: CompletionOutput
    is_first: bool
    rounds: Sequence[DraftRound] = ()


class Form(Protocol):
    """Says how a route writes choices."""

    prefix: str  # of the ids of answers
    name: str
    chunk_name: str

    def choice(self, api_request: ApiRequest, part: Part) -> Json:
        """Write a choice that is whole."""

    def chunk_choices(self, api_request: ApiRequest, part: Part) -> list[Json]:
        """Write parts of a choice in a stream, in order."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Holds what an answer and all its chunks begin with."""

    answer_id: str
    model: str
    created: int

    @staticmethod
    def of(form: Form, api_request: ApiRequest) -> "Heading":
        """Draw an id, which is none of the engine's."""
        return Heading(f"{form.prefix}-{uuid.uuid4().hex}", api_request.model, int(time.time()))

    def fields(self, name: str) -> Json:
        """Return the fields. name: of the kind of object."""
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
        }


def usage(outputs: Sequence[RequestOutput], api_request: ApiRequest) -> Json:
    """Count tokens of all prompts and choices, and of speculation in OpenAI's own fields."""
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
    """Writes /v1/chat/completions. reading: of the answers' texts. token_bytes: of a token id."""

    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, reading: AnswerReading, token_bytes: TokenBytes) -> None:
        self._reading = reading
        self._token_bytes = token_bytes
        self._deltas: dict[int, ChatDeltas] = {}

    def choice(self, api_request: ApiRequest, part: Part) -> Json:
        """Write a message."""
        piece = part.new
        message = self._reading.message(piece.text, is_cut=piece.finish_reason == "length")
        reason = finish_reason(piece.finish_reason, bool(message.calls))
        head: Json = {"index": piece.index, "message": chat_message(message)}
        return {**head, **self._rest(api_request, part), "finish_reason": reason}

    def chunk_choices(self, api_request: ApiRequest, part: Part) -> list[Json]:
        """Write what the message grows by, a kind of text each, with all tokens in the first."""
        piece = part.new
        if piece.index not in self._deltas:
            self._deltas[piece.index] = ChatDeltas(self._reading)
        deltas = self._deltas[piece.index]
        has_tokens = api_request.returns_token_ids or api_request.params.logprobs is not None
        has_tokens = has_tokens or bool(part.rounds)
        found = deltas.new(piece.text, piece.finish_reason, has_tokens)
        ends: Json = {"finish_reason": None, "stop_reason": None}
        choices: list[Json] = [
            {"index": piece.index, "delta": delta, "logprobs": None, **ends} for delta in found
        ]
        if choices:
            choices[0] |= self._rest(api_request, part) | ends
            reason = finish_reason(piece.finish_reason, deltas.has_calls)
            choices[-1] |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
        return choices

    def _rest(self, api_request: ApiRequest, part: Part) -> Json:
        return {
            "logprobs": self._logprobs(api_request, part.new),
            "stop_reason": part.new.stop_reason,
            **_extras(api_request, part),
        }

    def _logprobs(self, api_request: ApiRequest, piece: CompletionOutput) -> Json | None:
        count = api_request.params.logprobs
        if piece.logprobs is None or count is None:
            return None
        pairs = zip(piece.token_ids, piece.logprobs, strict=True)
        content = [
            {
                **self._named(token, found),
                "top_logprobs": [self._named(each, found) for each in _best(found, count)],
            }
            for token, found in pairs
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, found: dict[int, Logprob]) -> Json:
        data = self._token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": _clamped(found[token].logprob), "bytes": list(data)}


class CompletionForm:
    """Writes /v1/completions. prompts: of the request, for echo. token_bytes: of a token id."""

    prefix = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, prompts: Sequence[Encoded], token_bytes: TokenBytes) -> None:
        self._prompts = prompts
        self._token_bytes = token_bytes
        self._offsets: dict[tuple[int, int], int] = {}  # after the last piece of each choice

    def choice(self, api_request: ApiRequest, part: Part) -> Json:
        """Write text, after the prompt if it was asked for."""
        has_prompt = api_request.echo and part.is_first
        if api_request.writes_nothing:
            rows = None if part.new.logprobs is None else part.new.logprobs[:0]
            nothing = CompletionOutput(part.new.index, "", [], "length", logprobs=rows)
            part = replace(part, new=nothing, is_first=True, rounds=())
        piece = part.new
        prompt = (self._prompts[part.position].text or "") if has_prompt else ""
        return {
            "index": part.position * api_request.params.n + piece.index,
            "text": prompt + piece.text,
            "logprobs": self._logprobs(api_request, part, has_prompt),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **_extras(api_request, part),
        }

    def chunk_choices(self, api_request: ApiRequest, part: Part) -> list[Json]:
        """Write a chunk, which has the form of a whole answer."""
        return [self.choice(api_request, part)]

    def _logprobs(self, api_request: ApiRequest, part: Part, has_prompt: bool) -> Json | None:
        piece = part.new
        if piece.logprobs is None:
            return None
        params = api_request.params
        found = _Columns(params.logprobs or 0, self._token_bytes, params.skip_special_tokens)
        text = (self._prompts[part.position].text or "") if api_request.echo else ""
        if has_prompt:
            found.add_prompt(part.output, text)
        key = part.position, piece.index
        offset = self._offsets.get(key, len(text))
        self._offsets[key] = found.add(piece.token_ids, piece.logprobs, offset)
        return found.as_dict()


class _Columns:
    """Lists logprobs of a completion by property. skips_special: special tokens have no text."""

    def __init__(self, count: int, token_bytes: TokenBytes, skips_special: bool) -> None:
        self._count = count
        self._token_bytes = token_bytes
        self._skips_special = skips_special
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._best: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, output: RequestOutput, text: str) -> None:
        """Add the prompt: its first token has no logprob, and special tokens may have no text."""
        rows = output.prompt_logprobs or []
        whole = text.encode("utf-8", "replace")
        place = offset = 0  # in bytes and in characters
        for token, found in zip(output.prompt_token_ids, rows, strict=True):
            data = self._token_bytes(token)
            self._add(token, found, offset)
            if place == 0 and not whole.startswith(data):  # it may have lost its first space
                data = data.removeprefix(b" ")
            if whole.startswith(data, place):
                place += len(data)
                offset += _num_chars(data)

    def add(self, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob]], offset: int) -> int:
        """Add generated tokens; return the offset after them."""
        for token, found in zip(token_ids, rows, strict=True):
            self._add(token, found, offset)
            if found[token].decoded_token or not self._skips_special:
                offset += _num_chars(self._token_bytes(token))
        return offset

    def as_dict(self) -> Json:
        """Return OpenAI's form."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._best,
            "text_offset": self._offsets,
        }

    def _add(self, token: int, found: dict[int, Logprob] | None, offset: int) -> None:
        self._tokens.append(_key(self._token_bytes(token)))
        self._offsets.append(offset)
        self._values.append(None if found is None else _clamped(found[token].logprob))
        self._best.append(None if found is None else self._named(token, found))

    def _named(self, token: int, found: dict[int, Logprob]) -> dict[str, float]:
        """Name the best ones and the token itself; if bytes are equal, others go by their ids."""
        ranked = list(dict.fromkeys([*_best(found, self._count), token]))
        keys = {token: _key(self._token_bytes(token))}
        for each in ranked:
            key = _key(self._token_bytes(each))
            keys.setdefault(each, f"token_id:{each}" if key in keys.values() else key)
        return {keys[each]: _clamped(found[each].logprob) for each in ranked}


def _key(data: bytes) -> str:
    """Return a token as text, or what OpenAI writes for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _num_chars(data: bytes) -> int:
    """Count characters that begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _clamped(value: float) -> float:
    """Return a logprob that JSON can hold."""
    return max(value, LEAST_LOGPROB)


def _best(found: dict[int, Logprob], count: int) -> list[int]:
    """Return the ids of the best alternatives at one position, in order."""
    ranked = sorted(found, key=lambda token: found[token].rank)
    return [token for token in ranked if found[token].rank <= count]


def _extras(api_request: ApiRequest, part: Part) -> Json:
    """Return token ids, the prompt's in the first part, and rounds, if they are asked for."""
    found: Json = {}
    if api_request.returns_token_ids:
        found["token_ids"] = part.new.token_ids
        if part.is_first:
            found["prompt_token_ids"] = part.output.prompt_token_ids
    if api_request.shows_drafts:
        found["rounds"] = [asdict(each) for each in part.rounds]
    return found
