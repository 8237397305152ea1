"""The server's image: no engine of containers runs here, so its parts are tried one by one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli import main
from tests.demo_server import demo_server

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", "")


def _words(instruction: str) -> list[str]:
    [found] = re.findall(rf"^{instruction}\b.*?(\[.*\])$", TEXT, re.MULTILINE)
    return json.loads(found)


def test_the_check_of_health_fails_without_a_server_that_is_well():
    python, *words = _words("HEALTHCHECK")
    assert python == "python3"
    with demo_server() as url:
        command = [sys.executable, *(word.replace("http://127.0.0.1:8000", url) for word in words)]
        assert subprocess.run(command).returncode == 0
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 1


def test_the_image_starts_a_server_that_its_check_can_reach(capsys):
    program, command, *options = _words("ENTRYPOINT")
    assert (program, command) == ("specdec", "serve")
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--host": "0.0.0.0",
        "--port": re.search(r"^EXPOSE (\d+)$", TEXT, re.MULTILINE)[1],
    }
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in (*options[::2], "--draft"))


def test_no_root_runs_the_server_and_its_models_are_a_volume():
    [user] = re.findall(r"^USER (\d+):\d+$", TEXT, re.MULTILINE)
    assert int(user) > 0
    assert f"useradd --create-home --uid {user} " in TEXT
    assert TEXT.index("\nUSER ") < TEXT.index("\nENTRYPOINT")
    assert re.findall(r"^VOLUME (.+)$", TEXT, re.MULTILINE) == ["/models"]
    [folders] = re.findall(r"^ENV (HF_HOME=.+)$", TEXT, re.MULTILINE)
    assert [each for each in folders.split() if "=/models/" not in each] == []


def test_the_build_gets_all_that_the_package_is_made_of():
    ignored, *kept = (ROOT / ".dockerignore").read_text().splitlines()
    names = {line.removeprefix("!") for line in kept if line.startswith("!")}
    assert ignored == "*"
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert names >= {"specdec", "graphs", "weights", "pyproject.toml", "README.md", "LICENSE"}
    assert set(re.findall(r"/src/([\w.-]+)", TEXT)) <= names
