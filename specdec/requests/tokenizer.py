"""Text and conversations to tokens, and tokens to text, one after another."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.arguments import check_bool
from specdec.requests.chat_template import TemplateProcess
from specdec.requests.tokenizer_files import read_tokenizer

Conversation = Sequence[Mapping[str, str]]  # messages, {"role": ..., "content": ...}

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of one thing in a message; templates read the first


class Tokenizer:
    """The checkpoint's own tokenizer, as transformers reads it. Threads take turns: it sets options as it is called."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.backend = directory, read_tokenizer(directory)
        self._templates = TemplateProcess()
        self._lock = threading.RLock()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the checkpoint's tokenizer does."""
        _check_text(text)
        with self._lock:
            return list(self.backend.encode(text))

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text, no special tokens."""
        _check_text(text)
        with self._lock:
            return list(self.backend.encode(text, add_special_tokens=False))

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return bool(getattr(self.backend, "chat_template", None))

    def encode_chat(
        self,
        messages: Conversation,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the template writes it, which adds the special tokens itself.

        add_generation_prompt: end with the beginning of an answer. chat_template: instead of the tokenizer's own.
        """
        return self.encode_word(self.write_chat(messages, add_generation_prompt, chat_template))

    def write_chat(
        self,
        messages: Conversation,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> str:
        """The text of a conversation. Unlike all else here it may be asked for by several threads at once."""
        check_bool("add_generation_prompt", add_generation_prompt)
        template = self._template(chat_template)
        _check_messages(messages)
        variables = {
            **self.backend.special_tokens_map,
            "messages": [_as_templates_read(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates.render(template, variables)
        except ValueError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def _template(self, chat_template: str | None) -> str:
        """The Jinja text: what was given (the text, or a name among several), else the tokenizer's own."""
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"chat_template={chat_template!r}: give Jinja text, or None for the tokenizer's own"
            )
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template: give a chat_template, as Jinja text, or a "
                "prompt instead of messages"
            )
        template = self.backend.get_chat_template(chat_template)
        if not isinstance(template, str):
            raise ValueError(f"chat_template={template!r:.100}: give Jinja text")
        return template

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, nothing cleaned up."""
        with self._lock:
            text: str = self.backend.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text


class Detokenizer:
    """Text of a growing token sequence. An incomplete UTF-8 character is held back until it is whole.

    Each token decodes a short window: the tokens of the last piece of text and those behind it, so that a token whose
    text depends on its neighbour (spaces, bytes of one character) comes out as in the full decode. What was given out
    stays: where the full decode of more tokens changes earlier text, only the new tokens' own text is added. Tokenizers
    with byte fallback do so: broken bytes spoil whole characters before them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._window = 0
        self._pieces: list[tuple[int, int]] = [
            (0, 0)
        ]  # tokens and characters up to the end of each piece of text
        self.text = ""

    def push(self, token: int) -> str:
        """Append a token; returns the text it completed, maybe none."""
        self._tokens.append(token)
        read, count = self._pieces[-1][0], len(self._tokens)
        before, after = self._decode(self._window, read), self._decode(self._window, count)
        if after.endswith(INCOMPLETE):
            return ""
        piece = after[len(before) :] if after.startswith(before) else self._decode(read, count)
        if piece:
            self.text += piece
            self._window = read
            self._pieces.append((count, len(self.text)))
        return piece

    def decode_all(self, num_tokens: int) -> str:
        """The full decode of the first tokens, with an incomplete character at the end as a replacement character."""
        read, num_chars = next(piece for piece in reversed(self._pieces) if piece[0] <= num_tokens)
        given, full = self.text[:num_chars], self._decode(0, num_tokens)
        return full if full.startswith(given) else given + self._decode(read, num_tokens)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], self._skip_special_tokens)


def _check_text(text: str) -> None:
    """Half of a pair of surrogates is no text: it stands for a byte that was none of UTF-8, as on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{text!r}: character {error.start} is no Unicode text; give text in UTF-8"
        ) from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r}: give a list of messages with role and content")
    for index, message in enumerate(messages):
        values = (
            [message.get(key) for key in ("role", "content")]
            if isinstance(message, Mapping)
            else [None]
        )
        if not all(isinstance(value, str) for value in values):
            raise ValueError(
                f'messages[{index}] is {message!r}: give {{"role": text, "content": text}}'
            )
        _check_text(message["role"])
        _check_text(message["content"])


def _as_templates_read(message: Mapping[str, object]) -> dict[str, object]:
    """Keys without a value left out, and the reasoning under each name that templates know."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning} | kept | {"reasoning_content": reasoning}
