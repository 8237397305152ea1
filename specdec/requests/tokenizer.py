"""Text and conversations to tokens, and tokens to text, one after another."""

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from specdec.arguments import check_text
from specdec.requests.chat_format import ChatFormat, Conversation, MarkedText, SpecialMarks
from specdec.requests.chat_template import TemplateProcess
from specdec.requests.file_tokenizer import FileTokenizer
from specdec.requests.tokenizer_files import read_tokenizer, read_with_transformers

logger = logging.getLogger("specdec")
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LONGEST = 4  # bytes of a character, and so tokens
MOST_PENDING = 2 * LONGEST  # tokens that are held back
DEFAULT_FORMAT = ChatFormat()
HEX = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
Step = Callable[[bytes], bytes]


class Tokenizer:
    """Reads and writes tokens of a checkpoint, as its tokenizer in transformers does.

    It is locked, since a call changes its options. backend: a FileTokenizer, or a tokenizer of
    transformers where tokenizer.json is not enough.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend, self._decode = read_tokenizer(directory)
        self._fast: Any = getattr(self.backend, "backend_tokenizer", None)
        self._steps = decoding_steps(self._fast)
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for
        self._templates = TemplateProcess()
        self._lock = threading.RLock()

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer adds.

        parse_special: read special tokens in the text as such; otherwise they are text like any.
        """
        check_text(text)
        options = {} if parse_special else {"split_special_tokens": True}
        with self._lock:
            ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens, **options))
        bos = getattr(self.backend, "bos_token_id", None)
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            _warn_of_two(str(self.backend.bos_token))
        return ids

    @cached_property
    def in_transformers(self) -> Any:
        """The tokenizer of transformers, imported and read when first asked for."""
        if isinstance(self.backend, FileTokenizer):
            return read_with_transformers(self.directory)[0]
        return self.backend

    def encode_word(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def as_json(self) -> str:
        """Write a tokenizer.json, added tokens included; ValueError if there is none."""
        if self._fast is None:
            kind = type(self.backend).__name__
            raise ValueError(f"{kind} in {self.directory} cannot be written as tokenizer.json")
        with self._lock:
            return str(self._fast.to_str())

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.backend, "chat_template", None))

    @property
    def eos_token_id(self) -> int | None:
        found = getattr(self.backend, "eos_token_id", None)
        return None if found is None else int(found)

    def tokens_outside(self, vocab_size: int) -> list[tuple[int, str]]:
        """List the tokens that a vocabulary of this size lacks, by id."""
        with self._lock:
            found = {id: text for text, id in self.backend.get_vocab().items()}
            added = dict.fromkeys(self.backend.encode("a"), "added to every text")
        found = added | found
        return sorted((id, found[id]) for id in found if not 0 <= id < vocab_size)

    def encode_chat(
        self,
        messages: Conversation,
        form: ChatFormat = DEFAULT_FORMAT,
        add_special_tokens: bool = False,
        parse_special: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation; its template adds the special tokens.

        parse_special: read those as such that stand in messages, tools and documents too.
        """
        if parse_special:
            return self.encode(self.write_chat(messages, form), add_special_tokens)
        return self.encode_marked(self.write_marked_chat(messages, form), add_special_tokens)

    def encode_marked(self, marked: MarkedText, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation whose special tokens are the template's alone."""
        check_text(marked.text)
        if self._fast is None:
            kind = type(self.backend).__name__
            raise ValueError(f"parse_special=False: {kind} does not tell where its tokens are")
        special = self._special_tokens
        splits = getattr(self.backend, "split_special_tokens", False)
        with self._lock:
            self._fast.encode_special_tokens = splits
            found = self._fast.encode(marked.text, add_special_tokens=add_special_tokens)
            ids: list[int] = []
            for token, (start, end) in zip(found.ids, found.offsets, strict=True):
                if token in special and marked.is_marked(start, end):
                    ids += self._encode_within(marked.text[start:end])
                else:
                    ids.append(token)
        return ids

    def _encode_within(self, text: str) -> list[int]:
        """Encode text within another one: some tokenizers put a space before the first word."""
        line = self.encode("\n", add_special_tokens=False, parse_special=False)
        after = self.encode("\n" + text, add_special_tokens=False, parse_special=False)
        if after[: len(line)] == line:
            return after[len(line) :]
        return self.encode(text, add_special_tokens=False, parse_special=False)

    @property
    def _special_tokens(self) -> dict[int, str]:
        added = self.backend.added_tokens_decoder
        return {token: each.content for token, each in added.items() if each.special}

    def write_chat(self, messages: Conversation, form: ChatFormat = DEFAULT_FORMAT) -> str:
        """Write a conversation as text. It takes no lock of the tokenizer while it renders."""
        return form.ended(self._written(form, form.variables(messages)), messages)

    def write_marked_chat(
        self, messages: Conversation, form: ChatFormat = DEFAULT_FORMAT
    ) -> MarkedText:
        """Write a conversation with marks where the user writes special tokens."""
        marks = SpecialMarks(self._special_tokens.values())
        given = {name: marks.put(value) for name, value in form.variables(messages).items()}
        text = self._written(form, given)
        return MarkedText.of(form.ended(text, cast(Conversation, given["messages"])))

    def _written(self, form: ChatFormat, variables: Mapping[str, object]) -> str:
        chat_template = form.template_text()
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self.directory} has no chat template: give a chat_template, as "
                "Jinja text, or a prompt instead of messages"
            )
        template = self.backend.get_chat_template(chat_template, tools=form.tools or None)
        if not isinstance(template, str):
            raise ValueError(f"chat_template={template!r:.100}: give Jinja text")
        given = {**self.backend.special_tokens_map, **variables}
        try:
            return self._templates.render(template, given, form.chat_template_content_format)
        except ValueError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def close(self) -> None:
        """End the process that renders templates; the next conversation starts another."""
        self._templates.close()

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes: those of all tokens, joined, are the text in UTF-8.

        Where the decoder is unknown they are those of its text. Takes no lock otherwise.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        name = None if self._steps is None else self._fast.id_to_token(token_id)
        if self._steps is None or name is None:
            return self.decode([token_id], False).encode()
        data: bytes = name.encode("utf-8", "replace")
        for step in self._steps:
            data = step(data)
        return data

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without clean-up."""
        with self._lock:
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)


@cache
def _warn_of_two(bos: str) -> None:
    logger.warning(
        "a prompt begins with %s and the tokenizer adds another: leave it out of the text, or give "
        "token ids (over HTTP add_special_tokens=false); this is said once",
        bos,
    )


class Detokenizer:
    """Writes a growing token sequence as text, and holds incomplete characters back.

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
        """Return what is new in the text of the window's first tokens, and begin after them."""
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
        """Decode the first tokens as a whole; an incomplete last character becomes U+FFFD."""
        read, num_chars = next(piece for piece in reversed(self._pieces) if piece[0] <= num_tokens)
        given = self.text[:num_chars]
        full = self._decode(self._tokens[:num_tokens])
        if full.startswith(given):
            return full
        return given + self._decode(self._tokens[read:num_tokens])

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special_tokens)


def decoding_steps(fast: Any) -> list[Step] | None:
    """Return what a tokenizer's decoder does to a token's name in the vocabulary, in bytes.

    Decoding one token alone gives U+FFFD for a part of a character, and drops the space that begins
    a word in tokenizers like sentencepiece. None where the decoder is unknown.
    """
    if fast is None or fast.decoder is None:
        return None
    form = json.loads(fast.decoder.__getstate__())
    steps = [_step(each) for each in form.get("decoders", [form])]
    return None if None in steps else [step for step in steps if step is not None]


def _step(form: dict[str, Any]) -> Step | None:
    match form:
        case {"type": "ByteLevel"}:
            return _from_byte_level
        case {"type": "ByteFallback"}:
            return _from_hex
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return lambda name: name.replace(old.encode(), new.encode())
        case {"type": "Metaspace", "replacement": str(sign)}:
            return lambda name: name.replace(sign.encode(), b" ")
        case {"type": "Fuse" | "Strip"}:  # they change whole texts only
            return lambda name: name
    return None


def _from_byte_level(name: bytes) -> bytes:
    """Map each character to a byte; a name with others stands for itself, as in tokenizers."""
    text = name.decode("utf-8", "replace")
    return bytes(BYTES[char] for char in text) if BYTES.keys() >= set(text) else name


def _from_hex(name: bytes) -> bytes:
    found = HEX.fullmatch(name)
    return name if found is None else bytes.fromhex(found[1].decode())


def _byte_level() -> dict[str, int]:
    """List GPT-2's characters for bytes: printable ones stay, the others follow 255 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTES = _byte_level()
