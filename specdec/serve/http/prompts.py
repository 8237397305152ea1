"""Prompts and conversations of requests as token ids.

It has tokenizers of its own and runs in threads (lanes.py), so that a long prompt delays neither
the engine's steps, which use the engine's tokenizer, nor the event loop, nor short prompts.
"""

import asyncio
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from specdec.arguments import is_integer
from specdec.requests.chat_format import ChatFormat, Conversation
from specdec.requests.intake import TokensPrompt
from specdec.requests.tokenizer import Tokenizer
from specdec.serve.http.errors import ApiError, ContextError
from specdec.serve.http.lanes import SHORT, Lane, size_of
from specdec.serve.http.options import MAX_CHOICES, ServerOptions

Result = TypeVar("Result")

MOST_MESSAGES = 4096  # of a conversation, each part of a content and each call counted as one
WANTED = "a string, a list of strings, a list of token ids, or a list of such lists"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Holds a prompt. text: None if token ids were given."""

    text: str | None
    token_ids: list[int]

    def for_engine(self) -> TokensPrompt:
        prompt: TokensPrompt = {"prompt_token_ids": self.token_ids}
        return prompt if self.text is None else {"prompt": self.text, **prompt}


class Prompts:
    """Encodes prompts. max_model_len: of one with at least one token of its answer."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, options: ServerOptions) -> None:
        self.tokenizer = tokenizer
        self._short = Lane(lambda: tokenizer)
        self._long = Lane(lambda: Tokenizer(tokenizer.directory))
        self._max_model_len = max_model_len
        self._options = options
        vocabulary = tokenizer.backend.get_vocab()
        self._longest = max(map(len, vocabulary))
        self._num_ids = max(vocabulary.values()) + 1
        own = getattr(tokenizer.backend, "chat_template", None)
        self.template = str(options.chat_template or own)  # all of them, if there are several
        self._knows_developer = "developer" in self.template
        # without them a model cannot tell a question from its own answer: it was not trained to
        self.tells_roles_apart = "role" in self.template

    async def completion(
        self, prompt: object, n: int = 1, add_special_tokens: bool = True
    ) -> list[Encoded]:
        """Encode the field `prompt` of a request for n samples each."""
        if not isinstance(prompt, list | str) or prompt == []:
            raise ApiError(400, f"prompt={reprlib.repr(prompt)}: give {WANTED}")
        prompts = [prompt] if isinstance(prompt, str) or is_integer(prompt[0]) else prompt
        if len(prompts) * n > MAX_CHOICES:
            given = f"{len(prompts)} prompts with n={n}"
            raise ApiError(400, f"prompt: {given}, at most {MAX_CHOICES} choices are allowed")
        spelling = add_special_tokens, self._options.parse_special
        return [
            Encoded(each, await self._encode(each, *spelling))
            if isinstance(each, str)
            else Encoded(None, self._checked_ids(each, "prompt"))
            for each in prompts
        ]

    async def chat(self, body: Mapping[str, object]) -> Encoded:
        """Encode the conversation of a request, rendered by the chat template."""
        form = self._form(body)
        special, parses = self._spelling(body, add_special_tokens=False)
        _check_number(body.get("messages"))
        messages = cast(Conversation, self._known_roles(body.get("messages")))
        size = size_of(messages, form.tools, form.documents, form.chat_template_kwargs)
        if parses:
            text = await self._in_thread(size, lambda each: each.write_chat(messages, form))
            return Encoded(text, await self._encode(text, special, parses, "messages"))
        marked = await self._in_thread(size, lambda each: each.write_marked_chat(messages, form))
        ids = await self._checked(
            marked.text, lambda each: each.encode_marked(marked, special), "messages"
        )
        return Encoded(marked.text, ids)

    async def tokenize(self, body: Mapping[str, object]) -> Encoded:
        """Encode the prompt or the conversation of a request to /tokenize."""
        if ("prompt" in body) == ("messages" in body):
            raise ApiError(400, "prompt and messages: give one of them", "prompt")
        if "messages" in body:
            return await self.chat(body)
        self._form(body)  # the fields of a conversation must be right even where there is none
        if not isinstance(body["prompt"], str):
            raise ApiError(400, f"prompt={reprlib.repr(body['prompt'])}: give a string")
        text = body["prompt"]
        return Encoded(text, await self._encode(text, *self._spelling(body, True)))

    async def with_text(self, prompt: Encoded) -> Encoded:
        """Add the text of a prompt that was given as token ids."""
        if prompt.text is not None:
            return prompt
        return replace(prompt, text=await self.decode(prompt.token_ids))

    async def decode(self, token_ids: object) -> str:
        """Return the text of token ids, special tokens included."""
        ids = self._checked_ids(token_ids, "tokens")
        return await asyncio.to_thread(self.tokenizer.decode, ids, False)

    def _spelling(self, body: Mapping[str, object], add_special_tokens: bool) -> tuple[bool, bool]:
        """Say whether special tokens are added to a text, and read in it; see Tokenizer.encode."""
        adds = body.get("add_special_tokens", add_special_tokens)
        return bool(adds), bool(body.get("parse_special", self._options.parse_special))

    def _checked_ids(self, ids: object, name: str) -> list[int]:
        if not isinstance(ids, list):
            raise ApiError(400, f"{name}={reprlib.repr(ids)}: give {WANTED}", name)
        self._check_count(len(ids), name)
        # the event loop walks over a million of them: builtins do
        if ids and (set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < self._num_ids):
            known = range(self._num_ids)
            wrong = next(each for each in ids if type(each) is not int or each not in known)
            wanted = f"token ids from 0 to {self._num_ids - 1}"
            raise ApiError(400, f"{name}: {reprlib.repr(wrong)} given, give {wanted}", name)
        return cast(list[int], ids)

    async def _encode(
        self, text: str, special: bool, parses: bool, name: str = "prompt"
    ) -> list[int]:
        return await self._checked(text, lambda each: each.encode(text, special, parses), name)

    async def _checked(
        self, text: str, encode: Callable[[Tokenizer], list[int]], name: str
    ) -> list[int]:
        """Return the ids, if they fit."""
        self._check_count(math.ceil(len(text) / self._longest), name, is_least=True)
        ids = await self._in_thread(len(text), encode)
        self._check_count(len(ids), name)
        return ids

    def _check_count(self, count: int, name: str, is_least: bool = False) -> None:
        if count >= self._max_model_len:
            raise ContextError(self._max_model_len, count, name, is_least=is_least)

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self.tokenizer.close()

    async def _in_thread(self, size: int, function: Callable[[Tokenizer], Result]) -> Result:
        lane = self._short if size <= SHORT else self._long
        try:
            return await lane.run(size, function)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _form(self, body: Mapping[str, object]) -> ChatFormat:
        template = body.get("chat_template")
        if template is not None and not self._options.trust_request_chat_template:
            reason = "the server runs without --trust-request-chat-template"
            raise ApiError(400, f"chat_template: refused, since {reason}")
        # never a file's or a template's name
        if template is not None and not (isinstance(template, str) and "{" in template):
            raise ApiError(400, f"chat_template={template!r}: give Jinja text")
        try:
            return ChatFormat(
                chat_template=template or self._options.chat_template,
                add_generation_prompt=bool(body.get("add_generation_prompt", True)),
                continue_final_message=bool(body.get("continue_final_message")),
                tools=body.get("tools"),  # type: ignore[arg-type]
                documents=body.get("documents"),  # type: ignore[arg-type]
                chat_template_kwargs=body.get("chat_template_kwargs"),  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _known_roles(self, messages: object) -> object:
        """Replace `developer`, OpenAI's newer name of `system`, by the one that templates know."""
        if self._knows_developer or not isinstance(messages, list):
            return messages
        return [
            {**each, "role": "system"}
            if isinstance(each, dict) and each.get("role") == "developer"
            else each
            for each in messages
        ]


def _check_number(messages: object) -> None:
    """Bound the messages: a template takes its time for each, however short it is."""
    if not isinstance(messages, list):
        return
    dicts = [each for each in messages if isinstance(each, dict)]
    inner = [each.get(name) for each in dicts for name in ("content", "tool_calls")]
    number = len(messages) + sum(len(each) for each in inner if isinstance(each, list))
    if number > MOST_MESSAGES:
        given = f"{number:,} messages, parts of them and calls"
        raise ApiError(400, f"messages: {given}, at most {MOST_MESSAGES:,} are allowed", "messages")
