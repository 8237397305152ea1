"""Invalid tokenizer files raise one error before weights are read; no checkpoint code is run."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from specdec.llm import LLM
from specdec.requests.tokenizer import Tokenizer
from specdec.requests.tokenizer_files import PARTS, VOCABULARIES
from weights.demo import demo_directory
from weights.errors import CheckpointError

ROOT = Path(__file__).parents[3]
ODD = {
    "null": b"null",
    "list": b"[]",
    "number": b"5",
    "empty": b"",
    "torn": b"{",
    "latin": b'{"a": "\xe9"}',
    "deep": b"[" * 100_000,
}
OBJECTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/more.jinja")
PLAIN = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|bos|>"}  # read through the registry


@pytest.fixture
def target(tmp_path):
    """A copy of the demo target without its weights."""
    directory = tmp_path / "target"
    shutil.copytree(
        demo_directory("target"), directory, ignore=shutil.ignore_patterns("*.safetensors*")
    )
    return directory


def change(file, **fields):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def refusal(directory):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(directory)
    return str(caught.value)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_file_that_is_no_json_object_is_refused_by_name(target, name, kind):
    (target / name).write_bytes(ODD[kind])
    words = refusal(target)
    assert name in words
    assert "not JSON" in words or "not an object" in words


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_a_path_that_is_no_file_is_refused_by_name(target, name, kind):
    (target / name).unlink(missing_ok=True)
    if kind == "directory":
        (target / name).mkdir()
    elif kind == "link":
        (target / name).symlink_to("nowhere")
    else:
        os.mkfifo(target / name)
    assert f"{name}: not a file that can be read" in refusal(target)


def test_a_directory_without_a_vocabulary_is_refused(target):
    (target / "tokenizer.json").unlink()
    assert "tokenizer.json: missing" in refusal(target)


def test_a_tokenizer_without_a_config_is_still_read(target):
    expected = Tokenizer(target).encode_word("def f(x):")
    (target / "tokenizer_config.json").unlink()
    assert Tokenizer(target).encode_word("def f(x):") == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_is_no_text_is_refused_by_name(target, name):
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_bytes(b"{{ \xff }}")
    assert f"{Path(name).name}: not UTF-8" in refusal(target)


@pytest.mark.parametrize(
    "name",
    [
        *(*OBJECTS, *TEMPLATES, "config.json", "merges.txt", "vocab.json", "vocab.txt"),
        *("spiece.model", "tokenizer.model", "tokenizer.4.0.0.json"),
    ],
)
def test_a_file_of_gigabytes_is_refused_before_it_is_read(target, name):
    (target / name).parent.mkdir(exist_ok=True)
    with (target / name).open("ab") as stream:
        stream.truncate(1 << 40)
    words = refusal(target)
    assert f"{Path(name).name}: " in words
    assert "bytes" in words


@pytest.mark.parametrize("name", ["additional_chat_templates/more.jinja", "merges.txt"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_among_the_files_is_refused(target, name, kind):
    (target / name).parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(target / name)
    else:
        (target / name).symlink_to("/dev/zero")
    assert f"{Path(name).name}: not a file" in refusal(target)


def test_every_file_that_a_tokenizer_of_transformers_reads_is_checked():
    models = Path(transformers.__file__).parent / "models"
    named = re.compile(r"VOCAB_FILES_NAMES = \{(.*?)\}", re.DOTALL)
    texts = [file.read_text() for file in models.glob("*/tokenization_*.py")]
    found = {
        name
        for text in texts
        for each in named.findall(text)
        for name in re.findall(r':\s*"([^"/]+)"', each)
    }
    assert "merges.txt" in found
    assert found <= {*VOCABULARIES, *PARTS, *OBJECTS}


@pytest.mark.parametrize(
    "fields", [{}, {"model": None}, {"model": {"type": "BPE"}}, {"added_tokens": 5}]
)
def test_a_vocabulary_of_the_wrong_form_is_refused(target, fields):
    (target / "tokenizer.json").write_text(json.dumps(fields))
    assert "tokenizer.json" in refusal(target)


def test_a_vocabulary_that_fails_at_its_first_use_is_refused(target):
    fields = json.loads((target / "tokenizer.json").read_text())
    fields["post_processor"]["special_tokens"] = {}
    (target / "tokenizer.json").write_text(json.dumps(fields))
    assert "tokenizer.json" in refusal(target)


@pytest.mark.parametrize(
    "fields",
    [
        {"bos_token": 5},
        {"model_max_length": []},
        {"tokenizer_class": 5},
        {"added_tokens_decoder": [1]},
    ],
)
def test_a_config_of_the_wrong_form_is_refused(target, fields):
    change(target / "tokenizer_config.json", **fields)
    assert "tokenizer_config.json" in refusal(target)


@pytest.mark.parametrize("template", [5, {"a": 5}, ["a"]])
def test_a_template_of_the_wrong_form_is_a_value_error(target, template):
    change(target / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=r"chat_template|tokenizer_config.json|template"):
        Tokenizer(target).encode_chat([{"role": "user", "content": "a"}])


def test_the_tokenizer_is_refused_before_the_weights_are_read(tmp_path, monkeypatch):
    directory = tmp_path / "target"
    shutil.copytree(demo_directory("target"), directory)
    (directory / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(
        "specdec.start.runners.load_target",
        lambda *args, **options: pytest.fail("weights were read"),
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(directory)


# code in a checkpoint


def with_code(directory, marker):
    """Python beside the tokenizer that leaves a mark when it is run."""
    directory.mkdir(exist_ok=True)
    (directory / "code.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\nclass Config: pass\n"
    )


ROADS = {
    "fast": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "code.Evil"]}}},
    "slow": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["code.Evil", None]}}},
    "old form": {"tokenizer_config.json": {"auto_map": ["code.Evil", "code.Evil"]}},
    "model": {"config.json": {"auto_map": {"AutoTokenizer": ["code.Evil", None]}}},
    "AutoTokenizer": {"tokenizer_config.json": {"tokenizer_class": "AutoTokenizer"}},
    "AutoConfig": {
        "tokenizer_config.json": {"tokenizer_class": "AutoConfig"},
        "config.json": {"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}},
    },
    "AutoModel": {
        "tokenizer_config.json": {"tokenizer_class": None},
        "config.json": {
            "model_type": "new",
            "tokenizer_class": "AutoModel",
            "auto_map": {"AutoModel": "code.Evil"},
        },
    },
    "AutoProcessor": {
        "tokenizer_config.json": {
            "tokenizer_class": "AutoProcessor",
            "auto_map": {"AutoProcessor": "code.Evil"},
        }
    },
    "RagTokenizer": {"tokenizer_config.json": {"tokenizer_class": "RagTokenizer"}},
    "rag": {
        "tokenizer_config.json": {"tokenizer_class": None},
        "config.json": {"model_type": "rag"},
    },
}


@pytest.mark.parametrize("road", ROADS)
def test_code_in_a_checkpoint_is_refused_whatever_standard_input_says(
    target, tmp_path, monkeypatch, capfd, road
):
    with_code(target, tmp_path / "marker")
    for name, fields in ROADS[road].items():
        change(target / name, **PLAIN | fields if name == "tokenizer_config.json" else fields)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    words = refusal(target)
    assert any(name in words for name in ROADS[road])
    assert not (tmp_path / "marker").exists()
    assert "Do you wish to run" not in capfd.readouterr().out


def test_a_model_of_an_unknown_type_does_not_run_its_code(target, tmp_path):
    with_code(target, tmp_path / "marker")
    change(target / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "code.Evil"]})
    change(target / "config.json", model_type="new", auto_map={"AutoConfig": "code.Config"})
    code = (
        "from specdec.requests.tokenizer import Tokenizer; from pathlib import Path; "
        f"Tokenizer(Path({str(target)!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], input="y\ny\ny\n", capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 1
    assert "auto_map says that the tokenizer is" in found.stderr
    assert "Do you wish to run" not in found.stdout
    assert not (tmp_path / "marker").exists()


def test_an_auto_map_of_the_model_alone_changes_nothing(target, tmp_path):
    with_code(target, tmp_path / "marker")
    expected = Tokenizer(target).encode_word("def f(x):")
    change(target / "config.json", auto_map={"AutoModelForCausalLM": "code.Evil"})
    change(target / "tokenizer_config.json", auto_map={})
    assert Tokenizer(target).encode_word("def f(x):") == expected
    assert not (tmp_path / "marker").exists()


def test_every_reading_of_a_checkpoint_refuses_code():
    """from_pretrained is called with trust_remote_code=False, torch.load with weights_only=True."""
    needed = {"from_pretrained": ("trust_remote_code", False), "torch.load": ("weights_only", True)}
    found = []
    for file in sorted(
        file
        for package in ("specdec", "weights", "graphs", "scripts")
        for file in (ROOT / package).rglob("*.py")
        if file.parent != ROOT / "specdec" / "parallel"  # where ranks of an engine are told
    ):
        tree = ast.parse(file.read_text())
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"pickle", "marshal", "shelve", "dill", "joblib"}, file
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            key = next((key for key in needed if name == key or name.endswith(f".{key}")), None)
            if key is not None:
                found.append(name)
                options = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
                assert options.get(needed[key][0]) is needed[key][1], (
                    f"{file}:{call.lineno}: {name}"
                )
    assert len(found) >= 3
