"""The arguments of LLM and AsyncLLM: visible to editors and type checkers, checked at run time."""

import inspect
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import get_type_hints

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from scripts.write_options import generated, page
from specdec import LLM, AsyncLLM, SpeculativeConfig
from specdec.config import EngineConfig
from specdec.options import AsyncEngineArgs, EngineOptions
from specdec.serve.http.options import ServerOptions
from specdec.start import device as device_module
from specdec.start.device import advise_threads
from specdec.start.locate import Hub, locate, locate_tokenizer

ROOT = Path(__file__).parents[2]
MISSPELT = """
from specdec import LLM, AsyncLLM, SamplingParams, SpeculativeConfig

LLM("demo", max_model_lne=512)
AsyncLLM("demo", max_num_sqes=3)
SamplingParams(temprature=0.5)
SpeculativeConfig("demo", num_speculative_token=3)
LLM("demo", {"model": "demo"}, max_model_len=512, dtype="float32", seed=None)
SamplingParams(temperature=0.5, max_new_tokens=3, stop=None)
"""


def test_the_types_name_every_option_of_an_engine():
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)


def test_what_is_generated_of_the_options_is_up_to_date():
    stale = [file.name for file, text in generated().items() if file.read_text() != text]
    assert stale == [], "run python -m scripts.write_options"


@pytest.mark.parametrize("config", [EngineConfig, SpeculativeConfig, ServerOptions])
def test_the_documentation_has_a_row_for_every_option(config):
    lines = page().splitlines()
    for each in fields(config):
        assert [line.startswith(f"| `{each.name}` |") for line in lines].count(True) in (1, 2)


@pytest.mark.parametrize("owner", [LLM, AsyncLLM, AsyncEngineArgs])
def test_help_shows_each_option_with_its_default(owner):
    shown = inspect.signature(owner).parameters
    assert list(shown)[:2] == ["model", "speculative_config"]
    assert {name: shown[name].default for name in list(shown)[2:]} == {
        each.name: each.default for each in fields(EngineConfig)
    }


@pytest.mark.slow
def test_mypy_finds_misspelt_arguments_in_a_users_file(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(MISSPELT)
    # torch's own types are not needed, and take long
    options = ["--strict", "--no-site-packages", "--ignore-missing-imports"]
    command = [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path}", str(file)]
    environment = {"MYPYPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    lines = [line for line in lines if "error:" in line]
    assert [line.split(":")[1] for line in lines] == ["4", "5", "6", "7"], done.stdout
    assert all("did you mean" in line for line in lines)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"trust_remote_code": True}, "trust_remote_code=True: .*no code of a checkpoint"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: give an integer from 1 to 256"),
        (
            {"tensor_parallel_size": 2, "compile_piecewise": True},
            "compile_piecewise=True with tensor_parallel_size=2: .* leave it out",
        ),
        ({"quantization": "awq"}, "quantization='awq': only None is possible"),
        ({"enable_chunked_prefill": False}, "parts of prompts ride in steps"),
        ({"disable_log_stats": 1}, "disable_log_stats=1: allowed are"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode='slow': only 'auto' is possible"),
        ({"swap_space": -1}, "swap_space=-1: give a number"),
        ({"revision": ""}, "revision='': give a string"),
        ({"tokenizer": 3}, "tokenizer=3: give a directory"),
    ],
)
def test_options_of_vllm_without_a_counterpart_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)


def test_a_hub_id_is_downloaded_as_asked(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").touch()
    seen = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **how: seen.update(how, name=name) or tmp_path,
    )
    hub = Hub(revision="v1", token="secret", directory="there")
    assert locate("owner/name", "target", hub) == tmp_path
    del seen["allow_patterns"]
    assert seen == {"name": "owner/name", "revision": "v1", "token": "secret", "cache_dir": "there"}


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """repository(file, ...): what the hub's repositories have; returns the patterns asked for."""

    def make(*files):
        asked = []

        def download(name, allow_patterns, **_):
            asked.append(allow_patterns)
            for file in files:
                if any(fnmatch(file, pattern) for pattern in allow_patterns):
                    (tmp_path / file).touch()
            return tmp_path

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: list(files))
        return asked

    return make


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_repository_of_pickles_says_how_to_convert_them(repository, role):
    repository("config.json", "pytorch_model.bin", "optimizer/state.bin")
    words = rf"^{role} a/b: its repository has only pytorch_model.bin: .*\(specdec convert DIR\)"
    with pytest.raises(ValueError, match=words):
        locate("a/b", role)
    with pytest.raises(ValueError, match=r"\(hf download a/b --revision v1 --local-dir DIR\)"):
        locate("a/b", role, Hub(revision="v1"))


def test_a_repository_without_weights_is_left_to_the_reader(repository, monkeypatch, tmp_path):
    repository("config.json")
    assert locate("a/b", "target") == tmp_path

    def offline(*_, **__):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    assert locate("a/b", "target") == tmp_path


def test_a_tokenizer_of_the_hub_comes_without_weights(repository, tmp_path):
    asked = repository("tokenizer.json", "model.safetensors")
    config = EngineConfig(tokenizer="a/b")
    assert locate_tokenizer("demo", config) == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    assert len(asked) == 1


def test_a_revision_of_a_local_directory_has_no_effect_and_says_so(caplog):
    locate("demo", "target", Hub(revision="main"))
    assert caplog.messages == ["revision='main' has no effect: target demo is on this machine"]


def test_a_draft_may_name_its_parallel_size_as_in_vllm():
    config = SpeculativeConfig("demo", draft_tensor_parallel_size=1)
    assert config.num_speculative_tokens == "auto"
    with pytest.raises(ValueError, match=r"=2 with tensor_parallel_size=4: give 1, .*, or 4"):
        LLM(
            "demo",
            {"model": "demo", "draft_tensor_parallel_size": 2},
            device="cpu",
            tensor_parallel_size=4,
        )
    with pytest.raises(ValueError, match="SpeculativeConfig does not take modle"):
        SpeculativeConfig(modle="demo")


@pytest.mark.parametrize("name", ["weights", "graphs"])
def test_a_users_own_module_with_our_name_is_named_in_the_error(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    done = _imported_in(tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"specdec needs its own package '{name}'" in last
    assert str(tmp_path / f"{name}.py") in last


@pytest.mark.slow
def test_specdec_is_imported_from_anywhere(tmp_path):
    (tmp_path / "specdec").mkdir()  # as the parent of a clone has one
    assert _imported_in(tmp_path).returncode == 0


def _imported_in(directory):
    """Its own directory comes first on the path, then the checkout."""
    script = directory / "script.py"
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nfrom specdec import LLM\n")
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize(
    "device, count, given, is_said",
    [
        ("cpu", 4, None, True),
        ("cpu", 1, None, False),
        ("cpu", 4, "4", False),
        ("cuda", 4, None, False),
    ],
)
def test_threads_are_advised_where_they_cost_time(
    monkeypatch, caplog, device, count, given, is_said
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    device_module.advise_threads.cache_clear()
    with caplog.at_level("WARNING", logger="specdec.threads"):
        advise_threads(torch.device(device))
    assert ["OMP_NUM_THREADS=1" in line for line in caplog.messages] == [True] * is_said
