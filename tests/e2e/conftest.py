"""Engines over the bundled pair, built once per setting."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from graphs.manager import CudaGraphManager
from graphs.modes import BatchDescriptor
from specdec import LLM, SamplingParams
from specdec.kernels.compilations import compilations


@pytest.fixture(scope="session")
def demo_llm() -> Callable[..., LLM]:
    """demo_llm(draft, K, **options): an engine on the CPU, kept for the session."""

    @cache
    def build(draft: str | None, num_speculative_tokens: int = 0, **options: object) -> LLM:
        speculation = (
            {"model": draft, "num_speculative_tokens": num_speculative_tokens} if draft else None
        )
        return LLM(
            "demo",
            speculation,
            **{"max_num_seqs": 24, "max_model_len": 512, "device": "cpu", **options},
        )

    return build


@pytest.fixture(scope="session")
def greedy() -> Callable[..., SamplingParams]:
    """greedy(max_tokens): greedy sampling that no EOS ends."""
    return lambda max_tokens, **more: SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more
    )


@pytest.fixture
def no_late_compilation() -> Iterator[None]:
    """The test fails if requests of an LLM wait for a kernel that is not rare."""
    before = compilations().unexpected.copy()
    yield
    assert compilations().unexpected - before == {}


@pytest.fixture
def replayed(monkeypatch) -> set[tuple[str, BatchDescriptor]]:
    """The full graphs that are replayed while the test runs, with their families."""
    found: set[tuple[str, BatchDescriptor]] = set()
    real = CudaGraphManager.run_fullgraph

    def run_fullgraph(manager: CudaGraphManager, desc: BatchDescriptor) -> object:
        found.add((manager.name, desc))
        return real(manager, desc)

    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", run_fullgraph)
    return found
