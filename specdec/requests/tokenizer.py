"""Text and conversations to tokens, and tokens to text, one after another."""

import threading
from pathlib import Path
from typing import Any

from specdec.arguments import check_text
from specdec.requests.chat_format import ChatFormat, Conversation
from specdec.requests.chat_template import TemplateProcess
from specdec.requests.tokenizer_files import plain_decoder, read_tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST = 4  # bytes of a character, and so tokens
MOST_PENDING = 2 * LONGEST  # tokens that are held back
DEFAULT_FORMAT = ChatFormat()


class Tokenizer:
    """The checkpoint's tokenizer, as transformers reads it. Locked: a call changes its options."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend: Any = read_tokenizer(directory)
        self._read = plain_decoder(self.backend)
        self._templates = TemplateProcess()
        self._lock = threading.RLock()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds."""
        check_text(text)
        with self._lock:
            return list(self.backend.encode(text))

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens."""
        check_text(text)
        with self._lock:
            return list(self.backend.encode(text, add_special_tokens=False))

    def as_json(self) -> str:
        """The text of a tokenizer.json, added tokens included; ValueError if there is none."""
        with self._lock:
            fast = getattr(self.backend, "backend_tokenizer", None)
            if fast is None:
                kind = type(self.backend).__name__
                raise ValueError(f"{kind} in {self.directory} cannot be written as tokenizer.json")
            text: str = fast.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(getattr(self.backend, "chat_template", None))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        found = getattr(self.backend, "eos_token_id", None)
        return None if found is None else int(found)

    def tokens_outside(self, vocab_size: int) -> list[tuple[int, str]]:
        """Ids and texts of all tokens that a vocabulary of this size does not have, in order."""
        with self._lock:
            found = {id: text for text, id in self.backend.get_vocab().items()}
            added = dict.fromkeys(self.backend.encode("a"), "added to every text")
        found = added | found
        return sorted((id, found[id]) for id in found if not 0 <= id < vocab_size)

    def encode_chat(self, messages: Conversation, form: ChatFormat = DEFAULT_FORMAT) -> list[int]:
        """Token ids of a conversation, rendered by the template, which adds the special tokens."""
        return self.encode_word(self.write_chat(messages, form))

    def write_chat(self, messages: Conversation, form: ChatFormat = DEFAULT_FORMAT) -> str:
        """The text of a conversation. Takes no lock of the tokenizer while it renders."""
        template = self._template(form)
        variables = self.backend.special_tokens_map | form.variables(messages)
        try:
            text = self._templates.render(template, variables, form.chat_template_content_format)
        except ValueError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error
        return form.ended(text, messages)

    def _template(self, form: ChatFormat) -> str:
        """The Jinja text: the given one (or one of several by name), else the tokenizer's own."""
        chat_template = form.template_text()
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template: give a chat_template, as "
                "Jinja text, or a prompt instead of messages"
            )
        template = self.backend.get_chat_template(chat_template, tools=form.tools or None)
        if not isinstance(template, str):
            raise ValueError(f"chat_template={template!r:.100}: give Jinja text")
        return template

    def close(self) -> None:
        """End the process that renders templates; the next conversation starts another."""
        self._templates.close()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, without clean-up."""
        with self._lock:
            return self._read(token_ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Text of a growing token sequence. An incomplete UTF-8 character is held back until whole.

    Each token decodes a short window: the tokens of the last piece of text and those after it, so
    that a token whose text depends on its neighbour (spaces, bytes of one character) comes out as
    in the full decode. Tokens without text leave the window, and of many tokens that complete no
    character only the last may still begin one, so it stays short. Text that was returned never
    changes: where the full decode of more tokens would change it, only the new tokens' own text is
    added. Tokenizers with byte fallback do so: invalid bytes spoil whole characters before them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text was returned,
        self._read_text = ""  # and what they decode to alone
        self._pieces = [(0, 0)]  # numbers of tokens and characters at the end of each piece of text
        self.text = ""

    def push(self, token: int) -> str:
        """Append a token; returns the text it completed, maybe none."""
        self._tokens.append(token)
        self._window.append(token)
        text = self._decode(self._window)
        end = len(self._window)
        if text.endswith(INCOMPLETE):
            if end - self._num_read <= MOST_PENDING:
                return ""
            end -= LONGEST - 1  # no character that is still incomplete begins before
            text = self._decode(self._window[:end])
        return self._take(text, end)

    def _take(self, text: str, end: int) -> str:
        """What is new in the text of the window's first tokens, which are read from here on."""
        new, later = self._window[self._num_read : end], self._window[end:]
        is_longer = text.startswith(self._read_text)
        piece = text[len(self._read_text) :] if is_longer else self._decode(new)
        if piece:
            self.text += piece
            self._pieces.append((len(self._tokens) - len(later), len(self.text)))
            self._window = new + later
            self._num_read = len(new)
            self._read_text = self._decode(new)
        elif self._read_text:
            self._window[self._num_read :] = later
        else:  # of the first tokens one may lose its space, and so tell that the next does not
            self._window = [*dict.fromkeys(self._window[:end]), *later]
            self._num_read = len(self._window) - len(later)
        return piece

    def decode_all(self, num_tokens: int) -> str:
        """The full decode of the first tokens; an incomplete last character becomes U+FFFD."""
        read, num_chars = next(piece for piece in reversed(self._pieces) if piece[0] <= num_tokens)
        given = self.text[:num_chars]
        full = self._decode(self._tokens[:num_tokens])
        if full.startswith(given):
            return full
        return given + self._decode(self._tokens[read:num_tokens])

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special_tokens)
