"""Text and conversations to tokens, and tokens to text, one after another."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError

from specdec.tokenizer_files import read_tokenizer

Conversation = Sequence[Mapping[str, str]]  # messages, {"role": ..., "content": ...}

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The checkpoint's own tokenizer, as transformers reads it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.backend = directory, read_tokenizer(directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the checkpoint's tokenizer does."""
        _check_text(text)
        return list(self.backend.encode(text))

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text, no special tokens."""
        _check_text(text)
        return list(self.backend.encode(text, add_special_tokens=False))

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return bool(getattr(self.backend, "chat_template", None))

    def encode_chat(
        self, messages: Conversation, add_generation_prompt: bool = True, chat_template: str | None = None
    ) -> list[int]:
        """Token ids of a conversation as the template writes it, which adds the special tokens itself.

        add_generation_prompt: end with the beginning of an answer. chat_template: instead of the tokenizer's own.
        """
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template: give a chat_template, as Jinja text, or a "
                "prompt instead of messages"
            )
        _check_messages(messages)
        try:
            token_ids = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
            )
        except (TemplateError, TypeError, LookupError, ArithmeticError) as error:  # a template is a program
            raise ValueError(f"the chat template does not take these messages: {error}") from error
        return list(token_ids)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, nothing cleaned up."""
        text: str = self.backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
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
        self._pieces: list[tuple[int, int]] = [(0, 0)]  # tokens and characters up to the end of each piece of text
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
        raise ValueError(f"{text!r}: character {error.start} is no Unicode text; give text in UTF-8") from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r}: give a list of messages with role and content")
    for index, message in enumerate(messages):
        values = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f'messages[{index}] is {message!r}: give {{"role": text, "content": text}}')
        _check_text(message["content"])
