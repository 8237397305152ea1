"""Outputs are written in OpenAI's forms: whole answers, chunks of streams, usage."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from specdec.requests.draft_spans import DraftRound
from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.serve.http.agents.answer_reading import AnswerReading, Message, MessageReader
from specdec.serve.http.agents.events import Arguments, Call, Content, Event, Reasoning
from specdec.serve.http.api_request import ApiRequest
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


def usage(outputs: Sequence[RequestOutput], api_request: ApiRequest) -> Json:
    """Count tokens of all prompts and choices, and of speculation in OpenAI's own fields."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    written = 0 if api_request.writes_nothing else written
    accepted = sum(output.stats.num_accepted_tokens for output in outputs)
    drafted = sum(output.stats.num_drafted_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": written,
        "total_tokens": num_prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


class ChatForm:
    """Writes /v1/chat/completions. reading: of the answers' texts. token_bytes: of a token id."""

    prefix = "chatcmpl"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, api_request: ApiRequest, reading: AnswerReading, token_bytes: TokenBytes
    ) -> None:
        self._api_request = api_request
        self._reading = reading
        self._token_bytes = token_bytes
        self._readers: dict[int, MessageReader] = {}  # of the choices of a stream
        self._begun: set[int] = set()

    def choice(self, part: Part) -> Json:
        piece = part.new
        message = self._reading.message(piece.text, is_cut=piece.finish_reason == "length")
        reason = finish_reason(piece.finish_reason, bool(message.calls))
        head: Json = {"index": piece.index, "message": _message(message)}
        return {**head, **self._rest(part), "finish_reason": reason}

    def chunk_choices(self, part: Part) -> list[Json]:
        """Write what the message grows by, a kind of text each, with all tokens in the first."""
        piece = part.new
        if piece.index not in self._readers:
            self._readers[piece.index] = self._reading.reader()
        reader = self._readers[piece.index]
        deltas = self._deltas(reader, part)
        ends: Json = {"finish_reason": None, "stop_reason": None}
        choices: list[Json] = [
            {"index": piece.index, "delta": delta, "logprobs": None, **ends} for delta in deltas
        ]
        if choices:
            choices[0] |= self._rest(part) | ends
            reason = finish_reason(piece.finish_reason, reader.num_calls > 0)
            choices[-1] |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
        return choices

    def _deltas(self, reader: MessageReader, part: Part) -> list[Json]:
        """Write one kind of text in each; the first one of a choice says whose it is."""
        piece = part.new
        events = reader.push(piece.text)
        if piece.finish_reason is not None:
            events += reader.finish(is_cut=piece.finish_reason == "length")
        if self._reading.is_plain and not events:
            events = [Content("")]
        deltas = [_delta(event) for event in events]
        # tokens are sent along even if their text is not certain yet
        has_tokens = has_token_fields(self._api_request) or bool(part.rounds)
        if not deltas and (piece.finish_reason is not None or has_tokens):
            deltas = [{}]
        if deltas and piece.index not in self._begun:
            self._begun.add(piece.index)
            deltas[0] = {"role": "assistant", **deltas[0]}
        return deltas

    def _rest(self, part: Part) -> Json:
        return {
            "logprobs": self._logprobs(part.new),
            "stop_reason": part.new.stop_reason,
            **_extras(self._api_request, part),
        }

    def _logprobs(self, piece: CompletionOutput) -> Json | None:
        count = self._api_request.params.logprobs
        if piece.logprobs is None or count is None:
            return None
        content = [
            {
                **self._named(token, found),
                "top_logprobs": [self._named(each, found) for each in _best(found, count)],
            }
            for token, found in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, found: dict[int, Logprob]) -> Json:
        data = self._token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": _clamped(found[token].logprob), "bytes": list(data)}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _message(message: Message) -> Json:
    """Write a whole message. Content is null where there is something else instead."""
    others = _reasoning(message.reasoning) if message.reasoning else {}
    if message.calls:
        others["tool_calls"] = [_call(each.name, each.arguments) for each in message.calls]
    content = None if others and not message.content else message.content
    return {"role": "assistant", "content": content, "refusal": None, **others}


def _delta(event: Event) -> Json:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case Call(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _reasoning(text: str) -> Json:
    """Use vLLM's name and its earlier one, which other servers use."""
    return {"reasoning": text, "reasoning_content": text}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Name the calls as the reason of a text that ends by itself and has some."""
    return "tool_calls" if reason == "stop" and has_calls else reason


class CompletionForm:
    """Writes /v1/completions. prompts: of the request, for echo. token_bytes: of a token id."""

    prefix = "cmpl"
    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, api_request: ApiRequest, prompts: Sequence[Encoded], token_bytes: TokenBytes
    ) -> None:
        self._api_request = api_request
        self._prompts = prompts
        self._token_bytes = token_bytes
        self._offsets: dict[tuple[int, int], int] = {}  # after the last piece of each choice

    def choice(self, part: Part) -> Json:
        """Write text, after the prompt if it was asked for."""
        has_prompt = self._api_request.echo and part.is_first
        if self._api_request.writes_nothing:
            rows = None if part.new.logprobs is None else part.new.logprobs[:0]
            nothing = CompletionOutput(part.new.index, "", [], "length", logprobs=rows)
            part = replace(part, new=nothing, is_first=True, rounds=())
        piece = part.new
        prompt = (self._prompts[part.position].text or "") if has_prompt else ""
        return {
            "index": part.position * self._api_request.params.n + piece.index,
            "text": prompt + piece.text,
            "logprobs": self._logprobs(part, has_prompt),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **_extras(self._api_request, part),
        }

    def chunk_choices(self, part: Part) -> list[Json]:
        """Write a chunk, which has the form of a whole answer."""
        return [self.choice(part)]

    def _logprobs(self, part: Part, has_prompt: bool) -> Json | None:
        """List tokens by property, with the offsets of their texts."""
        piece, params = part.new, self._api_request.params
        if piece.logprobs is None:
            return None
        text = (self._prompts[part.position].text or "") if self._api_request.echo else ""
        rows = self._prompt_rows(part.output, text) if has_prompt else []
        key = part.position, piece.index
        offset = self._offsets.get(key, len(text))
        for token, found in zip(piece.token_ids, piece.logprobs, strict=True):
            rows.append((token, found, offset))
            if found[token].decoded_token or not params.skip_special_tokens:
                offset += _num_chars(self._token_bytes(token))
        self._offsets[key] = offset
        return {
            "tokens": [_key(self._token_bytes(token)) for token, _, _ in rows],
            "token_logprobs": [
                found and _clamped(found[token].logprob) for token, found, _ in rows
            ],
            "top_logprobs": [
                found and best_by_text(token, found, params.logprobs or 0, self._token_bytes)
                for token, found, _ in rows
            ],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _prompt_rows(
        self, output: RequestOutput, text: str
    ) -> list[tuple[int, dict[int, Logprob] | None, int]]:
        """Place the prompt's tokens; the first has no logprob, special ones may have no text."""
        whole = text.encode("utf-8", "replace")
        place = offset = 0  # in bytes and in characters
        rows = []
        for token, found in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
            rows.append((token, found, offset))
            data = self._token_bytes(token)
            if place == 0 and not whole.startswith(data):  # it may have lost its first space
                data = data.removeprefix(b" ")
            if whole.startswith(data, place):
                place += len(data)
                offset += _num_chars(data)
        return rows


Form = ChatForm | CompletionForm  # how a route writes choices; prefix: of the ids of answers


def best_by_text(
    token: int, found: dict[int, Logprob], count: int, token_bytes: TokenBytes
) -> dict[str, float]:
    """Name the best tokens and the token itself; if bytes are equal, others go by their ids."""
    ranked = list(dict.fromkeys([*_best(found, count), token]))
    keys = {token: _key(token_bytes(token))}
    for each in ranked:
        key = _key(token_bytes(each))
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
    return max(value, LEAST_LOGPROB)


def _best(found: dict[int, Logprob], count: int) -> list[int]:
    """Return the ids of the best alternatives at one position, in order."""
    ranked = sorted(found, key=lambda token: found[token].rank)
    return [token for token in ranked if found[token].rank <= count]


def has_token_fields(api_request: ApiRequest) -> bool:
    """Say whether tokens are shown, so that a piece without text is an answer's part too."""
    return api_request.returns_token_ids or api_request.params.logprobs is not None


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
