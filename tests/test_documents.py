"""Every command and snippet of README, CONTRIBUTING and docs/ runs, or says what it needs.

A comment before a fence, `<!-- needs: gpu, net -->`, names what the default tests lack: then its
Python is only compiled, and its commands must have the options that they are given. `text` after
`sh` is what the commands print. Snippets of one document share their names.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.cli import main
from tests.demo_server import demo_server
from weights.families.table import titles

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted(ROOT.glob("CONTRIBUTING.md")), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [file.relative_to(ROOT).as_posix() for file in DOCUMENTS]
PEERS = "benchmarks/2026-11-27-h100-vllm-0.33.json"
NEEDS = {"gpu", "net", "ray", "terminal", "minutes", "container engine"}
URL = "http://127.0.0.1:8000"
SERVE = "specdec serve demo --draft demo"  # which tests/specdec/serve/http/test_process.py starts
FEWER = {"bench serve": "--request-rate 20 --num-requests 4 --max-tokens 8"}  # in a second
FENCE = re.compile(
    r"(?:^<!-- needs: ([^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
FOLDERS = ("specdec", "graphs", "weights", "tests", "scripts", "benchmarks", "examples", "docs")
OF_USERS = {"config.json", "tiles.json"}  # files that the repository need not have


@dataclass(frozen=True, slots=True)
class Snippet:
    """needs: what the default tests lack. printed: what the fence after it shows."""

    language: str
    code: str
    needs: frozenset[str]
    printed: str


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def snippets(name: str) -> list[Snippet]:
    """Read the fences of a document in their order."""
    found = [match.groups() for match in FENCE.finditer(text_of(name))]
    after = [*found, (None, "", "")][1:]
    return [
        Snippet(
            language,
            code,
            frozenset((needs or "").split(", ")) - {""},
            following[2] if following[1] == "text" else "",
        )
        for (needs, language, code), following in zip(found, after, strict=True)
    ]


def prose(name: str) -> str:
    """Return a document without its fences."""
    return re.sub(r"^```.*?^```$", "", text_of(name), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_server() as found:
        yield found


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Help texts by command, filled when they are asked for."""
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_all_code_is_in_fences_of_a_known_language(name):
    fences = re.findall(r"^\s*```(\w*)", text_of(name), re.MULTILINE)
    assert fences[1::2] == [""] * (len(fences) // 2)
    assert fences[::2] == [each.language for each in snippets(name)]
    assert {each.language for each in snippets(name)} <= {"sh", "python", "json", "text"}
    assert frozenset().union(*(each.needs for each in snippets(name))) <= NEEDS
    assert re.findall(r"\n\n {4}\S.*", prose(name)) == []  # an indented block is code, too
    assert text_of(name).isascii()


@pytest.mark.parametrize("name", [name for name in NAMES if snippets(name)])
def test_what_a_document_shows_runs(name, url, helps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {"__name__": "snippet"}
    for snippet in snippets(name):
        code = snippet.code.replace(URL, url)
        if snippet.language == "json":
            json.loads(code)
        elif snippet.language == "python":
            compiled = compile(code, name, "exec")
            None if snippet.needs else exec(compiled, names)
        elif snippet.language == "sh" and snippet.needs:
            [_check_options(line, helps, capsys) for line in code.splitlines()]
        elif snippet.language == "sh":
            shown = "".join(_run(line, capsys) for line in code.splitlines())
            missing = [line for line in snippet.printed.splitlines() if line not in shown]
            assert missing == [], shown


@pytest.mark.slow
def test_the_python_of_the_documents_has_types_that_fit(tmp_path):
    for name in NAMES:
        code = "\n".join(each.code for each in snippets(name) if each.language == "python")
        (tmp_path / re.sub(r"\W", "_", name)).with_suffix(".py").write_text(code)
    options = ["--strict", f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={tmp_path}/cache"]
    files = [str(file) for file in tmp_path.glob("*.py")]
    command = [sys.executable, "-m", "mypy", *options, *files]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout


def _run(line: str, capsys: pytest.CaptureFixture) -> str:
    """Run a command and return what it prints; those of specdec run in this process."""
    words = shlex.split(line, comments=True)
    if not words or line == SERVE:
        return ""
    if words[0] != "specdec":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with pytest.raises(SystemExit) as left:
        main([*words[1:], *FEWER.get(" ".join(words[1:3]), "").split()])
    assert left.value.code in (0, None), (line, capsys.readouterr())
    return "".join(capsys.readouterr())


def _check_options(line: str, helps: dict[str, str], capsys: pytest.CaptureFixture) -> None:
    """Commands of specdec in a line that cannot run here have the options that it gives them."""
    for command in line.split("&&"):
        words = shlex.split(command, comments=True)
        if not words or Path(words[0]).name != "specdec":
            continue
        of = " ".join(words[1:3]) if words[1:3] == ["bench", "serve"] else words[1]
        for option in (word for word in words[2:] if re.match("--?[a-z]", word)):
            assert _has(option, _help(of, helps, capsys)), line


def _has(option: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None


def _help(command: str, helps: dict[str, str], capsys: pytest.CaptureFixture) -> str:
    if command not in helps:
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        helps[command] = capsys.readouterr().out
    return helps[command]


def test_options_in_the_prose_exist(helps, capsys):
    listed = re.findall(r"^  (\w+(?: serve)?) ", _help("", helps, capsys), re.MULTILINE)
    texts = "".join(_help(command, helps, capsys) for command in listed if command != "None")
    spans = [span for name in NAMES for span in re.findall(r"`(--[a-z-]+)[^`]*`", prose(name))]
    assert len(spans) > 30
    assert [span for span in spans if not _has(span, texts)] == []


@pytest.mark.parametrize("name", NAMES)
def test_links_and_file_names_lead_somewhere(name):
    here = (ROOT / name).parent
    for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(name)):
        if file.startswith("https:"):
            continue
        target = (here / file).resolve() if file else ROOT / name
        assert target.exists(), file
        assert not anchor or anchor in _anchors(target), f"{file}#{anchor}"
    paths = rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`"
    quoted = set(re.findall(paths, prose(name)))
    assert [each for each in quoted if not (ROOT / each).exists()] == []
    files = set(re.findall(r"`([\w-]+\.(?:py|md|json|jsonl|sh|txt))`", prose(name))) - OF_USERS
    inside = (file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*"))
    assert files - {*inside, *(file.name for file in ROOT.glob("*.*"))} == set()


def _anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_readme_has_at_most_150_lines_and_links_every_document():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert [name for name in NAMES[1:] if f"]({name})" not in text] == []


@pytest.mark.parametrize("name", ["README.md", "docs/checkpoints.md"])
def test_a_document_lists_the_families_that_load(name):
    assert titles() in " ".join(text_of(name).split())


def test_the_readme_begins_with_the_two_commands():
    install = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e "
    commands = [line for each in snippets("README.md") for line in each.code.splitlines()]
    assert [line.removeprefix(install) for line in commands if line.startswith(install)] == [
        '. && .venv/bin/specdec generate demo "def __repr__(self):" --draft demo --max-tokens 60',
        '".[test]" && scripts/check.sh',
    ]


def test_the_table_beside_vllm_quotes_its_file():
    section = README.read_text().partition("## Figures\n")[2].partition("\n## ")[0]
    peers = json.loads(text_of(PEERS))
    speeds = peers["tokens_per_second"]
    facts = (peers["card"].removeprefix("one "), peers["date"], PEERS)
    versions = (peers["specdec"]["commit"], peers["specdec"]["torch"], peers["vllm"]["torch"])
    assert [
        each for each in (*facts, *versions, peers["vllm"]["version"]) if each not in section
    ] == []
    expected = [
        *(speeds["closed_loop"][count] for count in ("1", "8", "32", "64")),
        speeds["sampled"]["32"],
        speeds["context"]["16384x8"],
        peers["first_token_ms"]["8192"],
    ]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    for (load, ours, theirs, ratio), both in zip(rows[2:], expected, strict=True):
        for shown, value in ((ours, both["specdec"]), (theirs, both["vllm"])):
            decimals = len(shown.partition(".")[2])
            assert shown == f"{value:,.{decimals}f}"
        speed = both["specdec"] / both["vllm"]
        assert ratio == f"{1 / speed if 'milliseconds' in load else speed:.2f}"
