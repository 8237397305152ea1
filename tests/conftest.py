"""What all tests share: Triton's interpreter where there is no GPU, and the bundled pair."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts threads, which forks lack
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from graphs.frozen_heap import frozen_heap
from weights.demo import demo_directory, demo_prompts

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.quick_interpreter import quicken

    quicken()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests read no table of tiles that this machine's user has written."""
    os.environ["SPECDEC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _heeds_ctrl_c() -> None:
    """A shell without job control has what it runs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


LEFT_BYTES = 1 << 30  # that tests may leave behind until all of it is looked through


class _Left:
    resident_bytes = 0  # after the last collection of everything


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Collections in a test walk over what it made: torch and pytest are a million objects."""
    with frozen_heap(now=False):
        gc.freeze()
        yield
        gc.collect()
    if _resident_bytes() > _Left.resident_bytes + LEFT_BYTES:
        gc.collect()
        _Left.resident_bytes = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The 48 prompts of the bundled pair, token ids."""
    return demo_prompts()["prompts"]


@pytest.fixture(scope="session")
def references() -> list[list[int]]:
    """The target's 160 greedy tokens in float32 for the first 24 prompts, from transformers."""
    return demo_prompts()["greedy_float32"]


@pytest.fixture(scope="session")
def bare_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target without its chat template."""
    directory = tmp_path_factory.mktemp("bare")
    for file in demo_directory("target").iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
