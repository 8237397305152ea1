"""What garbage collections of a start walk over."""

import gc
import weakref

import pytest

from graphs.frozen_heap import frozen_heap
from graphs.tape.backend import TapeBackend
from specdec import LLM
from specdec.start import load


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def _frozen_heap():
    """Not here."""


@pytest.fixture
def walks():
    """Of each full collection, how many objects it walks over."""
    seen = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            seen.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_garbage_from_before_is_gone_and_later_garbage_is_found():
    early, late = weakref.ref(Cycle()), None
    with frozen_heap():
        assert gc.get_freeze_count() > 1000
        assert early() is None
        late = weakref.ref(Cycle())
        gc.collect()
        assert late() is None
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_stays_so():
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_captures_walk_over_what_they_made(walks, monkeypatch):
    monkeypatch.setattr(load, "graph_backend", lambda *_: TapeBackend())
    before = len(gc.get_objects())
    draft = {"model": "demo", "num_speculative_tokens": 2, "adaptive": False}
    sizes = {"max_num_seqs": 2, "max_model_len": 128, "num_kv_blocks": 8}
    graphs = {"cuda_graph_sizes": (1, 2), "cuda_graph_token_sizes": (16,)}
    LLM("demo", draft, device="cpu", **sizes, **graphs)
    assert len(walks) > 10
    assert sum(count > before / 2 for count in walks) <= 2
