"""What building an engine refuses, before anything large is read; and what it prints meanwhile."""

import dataclasses
import sys

import pytest

import specdec.llm
from specdec import LLM


def test_both_checkpoints_are_looked_for_before_one_is_read(monkeypatch):
    monkeypatch.setattr(specdec.llm, "load_target", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match="draft no/such/draft: no such directory"):
        LLM("demo", {"model": "no/such/draft"}, device="cpu")
    with pytest.raises(ValueError, match="target no/such/target: no such directory"):
        LLM("no/such/target", {"model": "demo"}, device="cpu")


@pytest.fixture
def windowed(monkeypatch):
    """The bundled pair, both of which attend over a window."""

    def give(name, window):
        real = getattr(specdec.llm, name)

        def load(*args, **kwargs):
            loaded = real(*args, **kwargs)
            return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, sliding_window=window))

        monkeypatch.setattr(specdec.llm, name, load)

    give("load_target", 96)
    give("load_eagle", 64)


def test_no_model_goes_beyond_its_sliding_window(windowed):
    options = {"device": "cpu", "max_num_seqs": 1}
    draft = {"model": "demo", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"the target attends over a sliding window of 96 tokens.*max_model_len=97"):
        LLM("demo", draft, max_model_len=97, **options)
    with pytest.raises(ValueError, match=r"the draft attends over a sliding window of 64 tokens.*max_model_len=65"):
        LLM("demo", draft, max_model_len=65, **options)
    assert LLM("demo", draft, max_model_len=64, **options).sizes.max_model_len == 64
    assert LLM("demo", draft | {"num_speculative_tokens": 0}, max_model_len=96, **options).sizes.max_model_len == 96


@pytest.mark.parametrize(
    "is_terminal, options, is_shown",
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"use_tqdm_on_load": False}, False),
    ],
)
def test_reading_weights_is_shown_on_a_terminal_unless_it_is_not_wanted(
    monkeypatch, capfd, is_terminal, options, is_shown
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    LLM("demo", {"model": "demo"}, device="cpu", max_num_seqs=1, max_model_len=64, **options)
    assert ("B/s" in capfd.readouterr().err) == is_shown
