"""tokenizer.json alone gives what AutoTokenizer gives; else transformers reads it."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdec.requests.file_tokenizer import FileTokenizer
from specdec.requests.tokenizer import Detokenizer, Tokenizer
from tests.specdec.requests.tokenizer_families import FAMILIES, texts, write_family
from weights.errors import CheckpointError

ROOT = Path(__file__).parents[3]
NUM_TEXTS = 1000


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A directory for each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(name, root / name) for name in FAMILIES}


def both(directory):
    """Our reading, which must be without transformers, and that of transformers."""
    ours = Tokenizer(directory)
    assert isinstance(ours.backend, FileTokenizer)
    return ours, AutoTokenizer.from_pretrained(directory)


def change(file, **fields):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def check_equal(ours, theirs, count=100):
    """Compare ids, texts, places, special tokens and templates."""
    backend = ours.backend
    assert backend.special_tokens_map == theirs.special_tokens_map
    assert list(backend.special_tokens_map) == list(theirs.special_tokens_map)
    assert backend.all_special_tokens == theirs.all_special_tokens
    assert backend.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert backend.get_vocab() == theirs.get_vocab()
    assert repr(backend.added_tokens_decoder) == repr(theirs.added_tokens_decoder)
    assert backend.chat_template == theirs.chat_template
    added = [each.content for each in theirs.added_tokens_decoder.values()]
    for text in texts(added, count):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        bare = {"add_special_tokens": False, "split_special_tokens": True}
        assert ours.encode(text, False, False) == theirs.encode(text, **bare), text
        for skips in (True, False):
            plain = theirs.decode(ids, skips, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skips) == plain, text
        assert backend.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids), text
        given = {"add_special_tokens": False, "return_offsets_mapping": True}
        expected = theirs(text, **given)
        assert ours.encode_word(text) == expected["input_ids"], text
        found = backend.backend_tokenizer.encode(text, add_special_tokens=False)
        assert found.offsets == expected["offset_mapping"], text


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_texts_and_special_tokens_are_those_of_transformers(families, name):
    check_equal(*both(families[name]), NUM_TEXTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_by_token_is_that_of_all_tokens(families, name):
    ours = Tokenizer(families[name])
    for text in texts(ours.backend.all_special_tokens, 200):
        ids = ours.encode(text)
        detokenizer = Detokenizer(ours)
        pieces = [detokenizer.push(token) for token in ids]
        assert "".join(pieces) == detokenizer.text
        assert detokenizer.decode_all(len(ids)) == ours.decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_written_as_transformers_writes_it(families, name):
    ours, theirs = both(families[name])
    messages = [{"role": "user", "content": "the quick [INST] <|im_end|> </s>"}]
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert ours.encode_chat(messages) == ids


SPECIAL = {"__type": "AddedToken", "content": "<new>", "lstrip": True, "normalized": True}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"bos_token": "<new>"},
        {"bos_token": None, "eos_token": SPECIAL},
        {"image_token": "<image>", "sep_token": "the"},
        {"additional_special_tokens": ["<a>", SPECIAL]},
        {"extra_special_tokens": ["<a>", "the", "quick"], "additional_special_tokens": ["<b>"]},
        {"extra_special_tokens": {"video_token": "<video>"}},
        {"add_bos_token": True, "add_eos_token": True},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": "c"}]},
        {"chat_template": None, "model_max_length": 7, "padding_side": "left"},
    ],
    ids=str,
)
def test_fields_of_the_config_mean_what_they_mean_to_transformers(tmp_path, name, fields):
    directory = write_family(name, tmp_path / name)
    change(directory / "tokenizer_config.json", **fields)
    check_equal(*both(directory))


def test_added_tokens_of_the_config_replace_those_of_the_vocabulary(tmp_path):
    for name in ("mistral", "qwen2"):
        directory = write_family(name, tmp_path / name)
        file = directory / "tokenizer_config.json"
        added = json.loads(file.read_text())["added_tokens_decoder"]
        for each in added.values():
            each["lstrip"] = not each["lstrip"]
        change(file, added_tokens_decoder=added | {"9999": {"content": "brown fox"}})
        check_equal(*both(directory))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizer"])
def test_a_mistral_takes_the_file_whatever_class_is_named(tmp_path, name, named):
    directory = write_family(name, tmp_path / name)
    change(directory / "tokenizer_config.json", tokenizer_class=named)
    change(directory / "config.json", model_type="mistral")
    check_equal(*both(directory))


def test_templates_in_files_count_first(tmp_path):
    directory = write_family("llama3", tmp_path / "llama3")
    (directory / "chat_template.jinja").write_text("{{ eos_token }}")
    ours, theirs = both(directory)
    assert ours.backend.chat_template == theirs.chat_template == "{{ eos_token }}"
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    ours, theirs = both(directory)
    assert ours.backend.chat_template == theirs.chat_template
    for given, tools in [(None, None), (None, [{}]), ("tool_use", None), ("text", [{}])]:
        found = ours.backend.get_chat_template(given, tools)
        assert found == theirs.get_chat_template(given, tools=tools)


def test_several_templates_without_a_default_are_refused_by_name(tmp_path):
    directory = write_family("llama3", tmp_path / "llama3")
    change(directory / "tokenizer_config.json", chat_template={"a": "x", "b": "y"})
    with pytest.raises(ValueError, match=r"no default: name one of \['a', 'b'\]"):
        Tokenizer(directory).encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("options", [{}, {"length": 9, "pad_token": "<pad>"}])
def test_a_vocabulary_that_cuts_and_pads_does_neither(tmp_path, options):
    directory = write_family("llama3", tmp_path / "llama3")
    made, _ = FAMILIES["llama3"][1]()
    made.enable_truncation(3)
    made.enable_padding(**options)
    made.save(str(directory / "tokenizer.json"))
    change(directory / "tokenizer_config.json", pad_token="<pad>")
    check_equal(*both(directory))


LEFT = [
    ("llama2", {"legacy": True}, "its class would replace its pre_tokenizer"),
    ("llama2", {"add_prefix_space": False}, "its class would replace its pre_tokenizer, decoder"),
    ("gpt2", {"add_prefix_space": False}, "its class would replace its pre_tokenizer"),
    ("gpt2", {"added_tokens_decoder": {}}, "added_tokens_decoder lacks '<|endoftext|>'"),
    ("llama3", {"tokenizer_class": None}, "tokenizer_class is None"),
    (
        "llama3",
        {"tokenizer_class": "Qwen2Tokenizer"},
        "its class would replace its normalizer, pre",
    ),
    ("llama3", {"tokenizer_class": "CohereTokenizer"}, "tokenizer_class is 'CohereTokenizer'"),
    ("llama3", {"split_special_tokens": True}, "split_special_tokens"),
    ("llama3", {"auto_map": {}}, "the field auto_map"),
    ("granite", {"fix_mistral_regex": False}, "the field fix_mistral_regex"),
]


@pytest.mark.parametrize("name, fields, reason", LEFT, ids=str)
def test_what_tokenizer_json_does_not_say_is_left_to_transformers(
    tmp_path, caplog, name, fields, reason
):
    directory = write_family(name, tmp_path / name)
    change(directory / "tokenizer_config.json", **fields)
    check_left(directory, caplog, reason)


@pytest.mark.parametrize(
    "file, text, reason",
    [
        ("special_tokens_map.json", '{"bos_token": "<new>"}', "special_tokens_map.json stands"),
        ("added_tokens.json", '{"<new>": 999}', "added_tokens.json stands"),
        ("tokenizer_config.json", "{}", "tokenizer_class is None"),
    ],
)
def test_legacy_files_are_left_to_transformers(tmp_path, caplog, file, text, reason):
    directory = write_family("llama3", tmp_path / "llama3")
    (directory / file).write_text(text)
    check_left(directory, caplog, reason)


def test_a_pad_token_of_the_vocabulary_alone_is_left_to_transformers(tmp_path, caplog):
    directory = write_family("llama3", tmp_path / "llama3")
    made, _ = FAMILIES["llama3"][1]()
    made.enable_padding()
    made.save(str(directory / "tokenizer.json"))
    check_left(directory, caplog, "tokenizer.json pads")


def test_a_class_that_the_model_names_is_looked_at_too(tmp_path, caplog):
    directory = write_family("llama3", tmp_path / "llama3")
    change(directory / "config.json", tokenizer_class="LlamaTokenizer")
    both(directory)
    change(directory / "config.json", tokenizer_class="CohereTokenizer")
    check_left(directory, caplog, "tokenizer_class is 'CohereTokenizer'")


def test_without_tokenizer_json_transformers_reads_the_other_files(tmp_path, caplog):
    directory = write_family("gpt2", tmp_path / "gpt2")
    made = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(made["vocab"]))
    merges = "\n".join(" ".join(each) for each in made["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    check_left(directory, caplog, "there is no tokenizer.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_special_tokens": "<a>"},
        {"added_tokens_decoder": {"0": {"content": "a", "lstrip": 5}}},
        {"eos_token": {"content": "a"}},
    ],
    ids=str,
)
def test_what_transformers_refuses_is_refused(tmp_path, fields):
    directory = write_family("llama3", tmp_path / "llama3")
    change(directory / "tokenizer_config.json", **fields)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer(directory)


def test_an_earlier_llama_is_left_to_transformers(tmp_path, caplog):
    directory = write_family("mistral", tmp_path / "mistral")
    change(directory / "config.json", model_type="llama")
    check_left(directory, caplog, "its class would replace its normalizer, pre_tokenizer")


def check_left(directory, caplog, reason):
    with caplog.at_level(logging.INFO, "specdec"):
        ours = Tokenizer(directory)
    [line] = [each.getMessage() for each in caplog.records if each.name == "specdec"]
    assert "transformers reads the tokenizer, since" in line
    assert reason in line
    theirs = AutoTokenizer.from_pretrained(directory)
    assert type(ours.backend) is type(theirs)
    assert ours.in_transformers is ours.backend
    for text in texts(theirs.all_special_tokens, 200):
        assert ours.encode(text) == theirs.encode(text)


def test_transformers_is_imported_when_its_tokenizer_is_asked_for(families):
    code = (
        "import sys; from pathlib import Path; from specdec.requests.tokenizer import Tokenizer\n"
        "chat = [{'role': 'user', 'content': 'a'}]\n"
        f"made = Tokenizer(Path({str(families['llama3'])!r})); ids = made.encode('the quick')\n"
        "made.decode(ids); made.encode_chat(chat, parse_special=False)\n"
        "made.close(); assert not {'transformers', 'torch'} & set(sys.modules)\n"
        "assert made.in_transformers.encode('the quick') == ids\n"
        "assert 'transformers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
