"""Text to tokens and back, the second token by token."""

from pathlib import Path

from transformers import AutoTokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The checkpoint's own tokenizer, as transformers reads it."""

    def __init__(self, directory: Path) -> None:
        self.backend = AutoTokenizer.from_pretrained(directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the checkpoint's tokenizer does."""
        return list(self.backend.encode(text))

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text, no special tokens."""
        return list(self.backend.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, nothing cleaned up."""
        text: str = self.backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class Detokenizer:
    """Text of a growing token sequence. An incomplete UTF-8 character is held back until it is whole.

    Each token decodes a short window: the tokens of the last piece of text and those behind it, so that a token whose
    text depends on its neighbour (spaces, bytes of one character) comes out as in the full decode.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._window, self._read = 0, 0
        self.text = ""

    def push(self, token: int) -> str:
        """Append a token; returns the text it completed, maybe none."""
        self._tokens.append(token)
        before = self._decode(self._window, self._read)
        after = self._decode(self._window, len(self._tokens))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self._window, self._read = self._read, len(self._tokens)
        self.text += after[len(before) :]
        return after[len(before) :]

    def decode_all(self, num_tokens: int) -> str:
        """The full decode of the first tokens, with an incomplete character at the end as a replacement character."""
        return self._decode(0, num_tokens)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], self._skip_special_tokens)
