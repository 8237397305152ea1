"""Text token by token is the text of the full decode, and no half character is ever shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.tokenizer import INCOMPLETE, Detokenizer, Tokenizer
from weights.demo import demo_directory

TOKENIZER = Tokenizer(demo_directory("target"))
VOCAB_SIZE = 4096
SAMPLES = [
    "",
    "def f(x):\n    return x\n",
    "日本語 🙂🙃 naïve",
    "👩‍👩‍👧‍👦 family",
    "  two  spaces ",
    "\t\r\n\x00",
    "a\N{REPLACEMENT CHARACTER}b",
]


def pieces_of(tokens, **options):
    detokenizer = Detokenizer(TOKENIZER, **options)
    return [detokenizer.push(token) for token in tokens], detokenizer


@pytest.mark.parametrize("text", SAMPLES)
def test_joined_pieces_are_the_text(text):
    pieces, detokenizer = pieces_of(TOKENIZER.encode(text))
    assert "".join(pieces) == detokenizer.text == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_joined_pieces_are_the_full_decode_of_any_text(text):
    tokens = TOKENIZER.encode(text)
    pieces, detokenizer = pieces_of(tokens)
    assert "".join(pieces) == detokenizer.text
    assert detokenizer.decode_all(len(tokens)) == TOKENIZER.decode(tokens) == text
    assert detokenizer.text == text or text.endswith(INCOMPLETE)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1) | st.integers(2, 257), max_size=30), st.booleans())
def test_pieces_of_any_tokens_are_a_prefix_of_the_full_decode(tokens, skip_special_tokens):
    # random tokens tear characters apart and start some in the middle
    pieces, detokenizer = pieces_of(tokens, skip_special_tokens=skip_special_tokens)
    full = TOKENIZER.decode(tokens, skip_special_tokens)
    assert "".join(pieces) == detokenizer.text
    assert full.startswith(detokenizer.text)
    assert full == detokenizer.text or full.endswith(INCOMPLETE)


@pytest.mark.parametrize("character", ["é", "語", "🙂"])
def test_a_character_is_held_back_until_its_last_byte(character):
    tokens = TOKENIZER.encode(f"a{character}b")[1:]
    assert len(tokens) > 3, "the tokenizer parts it"
    pieces, detokenizer = pieces_of(tokens)
    assert pieces == ["a", *[""] * (len(tokens) - 3), character, "b"]
    assert detokenizer.decode_all(2) == f"a{INCOMPLETE}"


def test_special_tokens_are_skipped_unless_asked_for():
    tokens = [0, *TOKENIZER.encode("x")[1:], 1]
    assert pieces_of(tokens)[0] == ["", "x", ""]
    assert pieces_of(tokens, skip_special_tokens=False)[0] == ["<|bos|>", "x", "<|eos|>"]


def test_a_prompt_begins_as_the_checkpoint_says():
    assert TOKENIZER.encode("x")[0] == 0
