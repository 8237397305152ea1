"""Text token by token equals the full decode, in steps of any size, and is never taken back."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.requests.chat_format import ChatFormat
from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Pieces, Request
from specdec.requests.stats import RequestStats
from specdec.requests.tokenizer import INCOMPLETE, MOST_PENDING, Detokenizer, Tokenizer
from specdec.requests.transformers_reader import plain_decoder, reader_of
from weights.demo import demo_directory

DEMO = Tokenizer(demo_directory("target"))
WORDS = [
    "\u2581",
    "\u2581\u2581",
    "a",
    "b",
    "\u2581a",
    "\u2581the",
    "x\u2581",
    "s",
    ".",
    "\u00e9",
    "\n",
    INCOMPLETE,
]
NUM_SPECIAL = 3
NUM_BYTES = 256
SAMPLES = [
    "",
    "def f(x):\n    return x\n",
    "\u65e5\u672c\u8a9e \U0001f642\U0001f643 na\u00efve",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "  two  spaces ",
    "\t\r\n\x00",
    "a\N{REPLACEMENT CHARACTER}b",
]
examples = settings(max_examples=80, deadline=None, derandomize=True)


def build(directory, decoder):
    """A tokenizer like sentencepiece: words with marked spaces, and single bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES)), *WORDS]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:NUM_SPECIAL]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """demo: byte-level. metaspace: the first token loses its space. llama: so does the text, and
    bytes make characters only where the whole run of them is valid."""
    replaced = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    spaced = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    return {
        "demo": DEMO,
        "metaspace": build(tmp_path_factory.mktemp("metaspace"), decoders.Sequence(spaced)),
        "llama": build(tmp_path_factory.mktemp("llama"), decoders.Sequence(replaced)),
    }


def some_tokens(name, max_size=30):
    """Token ids, special ones and single bytes more often than their number says."""
    few = st.integers(0, NUM_SPECIAL - 1)
    if name == "demo":
        return st.lists(
            st.integers(0, len(DEMO.backend.get_vocab()) - 1) | st.integers(2, 257) | few,
            max_size=max_size,
        )
    end = NUM_SPECIAL + NUM_BYTES
    bytes_of = st.text("ab \u00e9\u8a9e\U0001f642", min_size=1, max_size=3).map(
        lambda text: [NUM_SPECIAL + byte for byte in text.encode()]
    )
    words = st.integers(end, end + len(WORDS) - 1).map(lambda token: [token])
    parts = st.lists(words | bytes_of | few.map(lambda token: [token]), max_size=max_size)
    return parts.map(lambda found: [token for part in found for token in part])


def pieces_of(tokens, tokenizer=DEMO, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.push(token) for token in tokens], detokenizer


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@pytest.mark.parametrize("text", SAMPLES)
def test_joined_pieces_are_the_text(tokenizers, name, text):
    tokenizer = tokenizers[name]
    tokens = tokenizer.encode(text)
    pieces, detokenizer = pieces_of(tokens, tokenizer)
    assert (
        "".join(pieces)
        == detokenizer.text
        == detokenizer.decode_all(len(tokens))
        == tokenizer.decode(tokens)
    )
    assert detokenizer.text in (text, text.removeprefix(" "))


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@examples
@given(text=st.text(max_size=40), skip=st.booleans())
def test_joined_pieces_are_the_full_decode_of_any_text(tokenizers, name, text, skip):
    tokenizer = tokenizers[name]
    tokens = tokenizer.encode(text)
    pieces, detokenizer = pieces_of(tokens, tokenizer, skip_special_tokens=skip)
    full = tokenizer.decode(tokens, skip)
    assert "".join(pieces) == detokenizer.text
    assert detokenizer.decode_all(len(tokens)) == full
    assert detokenizer.text == full or text.endswith(INCOMPLETE)


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@examples
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_are_a_prefix_of_the_full_decode(tokenizers, name, data, skip):
    # random tokens tear characters apart and start some in the middle
    tokens = data.draw(some_tokens(name))
    pieces, detokenizer = pieces_of(tokens, tokenizers[name], skip_special_tokens=skip)
    full = tokenizers[name].decode(tokens, skip)
    assert "".join(pieces) == detokenizer.text
    assert full.startswith(detokenizer.text)
    assert detokenizer.decode_all(len(tokens)) == full
    assert full == detokenizer.text or full.endswith(INCOMPLETE)


@examples
@given(data=st.data(), tail=st.integers(0, 3))
def test_invalid_bytes_spoil_no_text_that_was_returned(tokenizers, data, tail):
    # with byte fallback one bad byte makes the whole run of bytes unreadable in the full decode
    tokens = data.draw(some_tokens("llama"))
    end = NUM_SPECIAL + NUM_BYTES
    torn = [*tokens, *(NUM_SPECIAL + byte for byte in "\U0001f643".encode()[:tail])]
    for more in ([], [NUM_SPECIAL + 0xC3], [end + 2, end + 1]):
        pieces, detokenizer = pieces_of([*torn, *more], tokenizers["llama"])
        final = detokenizer.decode_all(len(torn) + len(more))
        assert final.startswith("".join(pieces))
        assert final.startswith(tokenizers["llama"].decode(tokens))
        assert (INCOMPLETE in final) >= (tail > 0)


def test_a_text_cut_within_an_emoji_keeps_the_one_before_it(tokenizers):
    tokens = tokenizers["llama"].encode("a \U0001f642\U0001f643")[:-1]
    pieces, detokenizer = pieces_of(tokens, tokenizers["llama"])
    assert "".join(pieces) == "a \U0001f642"
    assert detokenizer.decode_all(len(tokens)) == "a \U0001f642" + 3 * INCOMPLETE
    assert "\U0001f642" not in tokenizers["llama"].decode(tokens)


def test_text_after_invalid_bytes_is_that_of_its_own_tokens(tokenizers):
    e_acute = [NUM_SPECIAL + 0xC3, NUM_SPECIAL + 0xA9]
    broken = NUM_SPECIAL + 0xE2
    letter = NUM_SPECIAL + NUM_BYTES + 2
    pieces, _ = pieces_of([*e_acute, broken, letter, letter], tokenizers["llama"])
    assert pieces == ["", "\u00e9", "", f"{INCOMPLETE}a", "a"]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizers, name, text):
    tokenizer = tokenizers[name]
    found = b"".join(map(tokenizer.token_bytes, tokenizer.encode_word(text)))
    written = found.decode()
    assert written.removeprefix(" ") == text.removeprefix(" ")
    assert len(written) - len(text) <= (name != "demo")  # the space before the first word


def test_the_bytes_of_special_tokens_and_of_unknown_decoders_are_their_text(
    tokenizers, monkeypatch
):
    assert DEMO.token_bytes(0) == b"<|bos|>"
    assert tokenizers["llama"].token_bytes(1) == b"<s>"
    monkeypatch.setattr(DEMO, "_steps", None)
    token = DEMO.encode_word(" def")[0]
    assert DEMO._read_bytes(token) == DEMO.decode([token], False).encode()


def test_a_token_of_a_long_text_decodes_a_short_window(monkeypatch):
    lengths = []
    real = DEMO.decode
    monkeypatch.setattr(
        DEMO, "decode", lambda tokens, skip: lengths.append(len(tokens)) or real(tokens, skip)
    )
    pieces_of(DEMO.encode_word("def f(x):\n    return x\n" * 20))
    assert max(lengths) <= 2


@pytest.mark.parametrize("text", ["", "x"])
@pytest.mark.parametrize("tokens", [[0], [0, 1], [130], [130, 97, 140]])
def test_a_window_stays_short_without_text_and_without_whole_characters(monkeypatch, text, tokens):
    """Special tokens, and bytes that complete no character."""
    lengths = []
    real = DEMO.decode
    monkeypatch.setattr(
        DEMO, "decode", lambda tokens, skip: lengths.append(len(tokens)) or real(tokens, skip)
    )
    emoji = DEMO.encode_word("\U0001f642")
    pieces, _ = pieces_of([*DEMO.encode_word(text), *tokens * 50, *emoji])
    assert max(lengths) <= 2 * MOST_PENDING
    assert "".join(pieces).startswith(text)
    assert pieces[-1].endswith("\U0001f642")


@examples
@given(tokens=some_tokens("demo", 20), dropped=st.integers(0, 20))
def test_the_text_of_fewer_tokens_than_were_pushed_is_their_own(tokens, dropped):
    _, detokenizer = pieces_of(tokens)
    count = max(len(tokens) - dropped, 0)
    assert detokenizer.decode_all(count) == DEMO.decode(tokens[:count])


@pytest.mark.parametrize("character", ["\u00e9", "\u8a9e", "\U0001f642"])
def test_a_character_is_held_back_until_its_last_byte(character):
    tokens = DEMO.encode(f"a{character}b")[1:]
    assert len(tokens) > 3, "the tokenizer parts it"
    pieces, detokenizer = pieces_of(tokens)
    assert pieces == ["a", *[""] * (len(tokens) - 3), character, "b"]
    assert detokenizer.decode_all(2) == f"a{INCOMPLETE}"


def test_special_tokens_are_skipped_unless_asked_for():
    tokens = [0, *DEMO.encode("x")[1:], 1]
    assert pieces_of(tokens)[0] == ["", "x", ""]
    assert pieces_of(tokens, skip_special_tokens=False)[0] == ["<|bos|>", "x", "<|eos|>"]


def test_a_prompt_begins_as_the_checkpoint_says():
    assert DEMO.encode("x")[0] == 0


# steps: the tokens of a request come in any number at a time


def request(tokenizer, skip=True, **rules):
    return Request(
        request_id="0",
        prompt=None,
        prompt_token_ids=[0],
        params=SamplingParams(temperature=0.0),
        rules=FinishRules(**{"max_tokens": 1000} | rules),
        detokenizer=Detokenizer(tokenizer, skip),
        stats=RequestStats(),
    )


def run_in_steps(made, tokens, sizes):
    """Append `tokens` in steps of these sizes, repeating the last one; returns the text after each
    step, and the pieces."""
    reader = Pieces(made)
    texts = []
    pieces = []
    position = 0
    sizes = list(sizes)
    while position < len(tokens) and made.finish is None:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        made.append(tokens[position : position + size], 0.0)
        position += size
        texts.append(made.text())
        pieces += reader.new()
    if made.finish is None:
        made.end("abort")
        texts.append(made.text())
        pieces += reader.new()
    return texts, pieces


def cut_by_hand(tokenizer, tokens, stops, is_included):
    """(text, tokens) up to the first token that completes a stop string, by searching it all."""
    detokenizer = Detokenizer(tokenizer)
    for count, token in enumerate(tokens, start=1):
        detokenizer.push(token)
        found = [
            (detokenizer.text.find(stop), -len(stop)) for stop in stops if stop in detokenizer.text
        ]
        if found:
            start, length = min(found)
            return detokenizer.text[: start - length if is_included else start], tokens[:count]
    return tokenizer.decode(tokens), tokens


step_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@examples
@given(data=st.data(), sizes=step_sizes, skip=st.booleans())
def test_joined_deltas_are_the_full_decode_in_any_steps(tokenizers, name, data, sizes, skip):
    tokens = data.draw(some_tokens(name))
    made = request(tokenizers[name], skip)
    texts, pieces = run_in_steps(made, tokens, sizes)
    assert (
        "".join(piece.text for piece in pieces)
        == texts[-1]
        == tokenizers[name].decode(tokens, skip)
    )
    assert [token for piece in pieces for token in piece.token_ids] == tokens
    assert all(texts[-1].startswith(text) for text in texts)


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@settings(examples, max_examples=100)
@given(data=st.data(), sizes=step_sizes, is_included=st.booleans())
def test_stop_strings_across_steps_cut_where_they_cut_the_whole_text(
    tokenizers, name, data, sizes, is_included
):
    tokenizer = tokenizers[name]
    tokens = tokenizer.encode(data.draw(st.text("ab \u00e9\u8a9e\U0001f642\n", max_size=24)))
    text = tokenizer.decode(tokens)
    starts = st.integers(0, max(len(text) - 1, 0))
    within = st.tuples(starts, st.integers(1, 6)).map(
        lambda span: text[span[0] : span[0] + span[1]]
    )
    stops = data.draw(
        st.lists(within | st.text("ab \u00e9", min_size=1, max_size=4), min_size=1, max_size=3)
    )
    stops = [stop for stop in stops if stop]

    made = request(tokenizer, stop_strings=stops, include_stop_str_in_output=is_included)
    texts, pieces = run_in_steps(made, tokens, sizes)
    assert (texts[-1], made.token_ids) == cut_by_hand(tokenizer, tokens, stops, is_included)
    assert "".join(piece.text for piece in pieces) == texts[-1]
    assert [token for piece in pieces for token in piece.token_ids] == made.token_ids
    assert all(texts[-1].startswith(text) for text in texts)


@examples
@given(
    text=st.text("abc", max_size=20),
    sizes=step_sizes,
    min_tokens=st.integers(0, 12),
    max_tokens=st.integers(1, 20),
)
def test_limits_and_stop_strings_together_take_nothing_back(text, sizes, min_tokens, max_tokens):
    tokens = [token for letter in text for token in DEMO.encode_word(letter)]
    rules = {
        "stop_strings": ["ab", "bca", "cc"],
        "min_tokens": min(min_tokens, max_tokens),
        "max_tokens": max_tokens,
    }
    made = request(DEMO, **rules)
    whole = request(DEMO, **rules)
    texts, pieces = run_in_steps(made, tokens, sizes)
    assert texts[-1] == run_in_steps(whole, tokens, [1])[0][-1] if tokens else True
    assert "".join(piece.text for piece in pieces) == texts[-1]
    assert all(texts[-1].startswith(shown) for shown in texts)


# conversations

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('role ' ~ message.role) }}{% endif %}"
    "# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_conversation_is_written_by_its_template_with_one_bos():
    text = "# user: a\n# assistant: b\n"
    assert DEMO.encode_chat(MESSAGES, ChatFormat(chat_template=TEMPLATE)) == DEMO.encode(
        text + "# assistant:"
    )
    assert DEMO.encode_chat(
        MESSAGES, ChatFormat(add_generation_prompt=False, chat_template=TEMPLATE)
    ) == DEMO.encode(text)
    assert DEMO.encode_chat(MESSAGES, ChatFormat(chat_template=TEMPLATE)).count(0) == 1


@pytest.mark.parametrize(
    "messages, template, message",
    [
        ("hello", TEMPLATE, "give a list of messages"),
        ([], TEMPLATE, "give a list of messages"),
        (["hello"], TEMPLATE, r"messages\[0\] is 'hello'"),
        ([*MESSAGES, {"role": "user"}], TEMPLATE, r"messages\[2\] is"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], TEMPLATE, r"messages\[0\] is"),
        ([{"role": "user", "content": [3]}], TEMPLATE, r"messages\[0\] is"),
        (
            [{"role": "system", "content": "a"}],
            TEMPLATE,
            "does not take these messages: role system",
        ),
        (MESSAGES, "{% if %}", "the chat template does not take these messages"),
        (
            MESSAGES,
            "{{ messages[0].content + 1 }}",
            "the chat template does not take these messages: can only conc",
        ),
        (
            MESSAGES,
            "{{ 1 / 0 }}",
            "the chat template does not take these messages: division by zero",
        ),
    ],
)
def test_conversations_that_cannot_be_written_are_refused(messages, template, message):
    with pytest.raises(ValueError, match=message):
        DEMO.encode_chat(messages, ChatFormat(chat_template=template))


def test_without_a_template_a_conversation_is_refused(bare_target):
    with pytest.raises(ValueError, match="has no chat template: give a chat_template"):
        Tokenizer(bare_target).encode_chat(MESSAGES)


@pytest.mark.parametrize("name", ["demo", "metaspace", "llama"])
@pytest.mark.parametrize("text", SAMPLES)
def test_a_tokenizer_is_the_one_that_transformers_finds(tokenizers, name, text):
    ours = tokenizers[name]
    theirs = AutoTokenizer.from_pretrained(tokenizers[name].directory)
    assert type(ours.in_transformers) is type(theirs)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), False) == theirs.decode(theirs.encode(text))


@pytest.mark.parametrize(
    "change", [{"tokenizer_class": "LlamaTokenizer"}, {"auto_map": {}}, {"tokenizer_class": None}]
)
def test_a_class_with_code_of_its_own_is_left_to_the_registry(tmp_path, change):
    build(tmp_path, decoders.ByteFallback())
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert reader_of(tmp_path, fields) is PreTrainedTokenizerFast
    assert reader_of(tmp_path, fields | change) is AutoTokenizer


def test_the_registry_of_models_stays_unread():
    code = (
        "import sys; from specdec.requests.tokenizer import Tokenizer\n"
        "from weights.demo import demo_directory\n"
        "Tokenizer(demo_directory('target')).in_transformers\n"
        "assert 'transformers.models.auto.auto_factory' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_decoding_skips_transformers_only_where_it_adds_nothing():
    backend = DEMO.in_transformers

    class Upper(type(backend)):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper()

    ids = DEMO.encode("def f(x):\n    return x")
    assert plain_decoder(backend) == backend.backend_tokenizer.decode
    upper = Upper(tokenizer_object=backend.backend_tokenizer, clean_up_tokenization_spaces=True)
    for skips in (True, False):
        expected = backend.decode(ids, skips, clean_up_tokenization_spaces=False)
        assert plain_decoder(backend)(ids, skip_special_tokens=skips) == expected
        assert plain_decoder(upper)(ids, skip_special_tokens=skips) == expected.upper()
