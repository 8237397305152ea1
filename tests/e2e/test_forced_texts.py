"""Forced rounds are those that plain decoding tells, guided and unguided."""

import pytest

from specdec import LLM, SamplingParams
from specdec.cli.verify import count_equal
from tests.e2e import forced_texts

K = 3


@pytest.fixture(scope="module")
def llm():
    speculation = {"model": "demo", "num_speculative_tokens": K}
    return LLM("demo", speculation, device="cpu", max_num_seqs=16, max_model_len=256)


@pytest.fixture(scope="module")
def found(llm):
    """The text of a schema and its positions."""
    params, text = forced_texts.written(llm, "flat object", 40)
    return text, forced_texts.forced_positions(llm, params, text)


def test_guided_drafts_are_accepted_while_they_are_the_text(found):
    text, positions = found
    assert len(positions) == len(text) - K > 12
    for t, position in enumerate(positions):
        assert position.guided == count_equal(position.drafts, text[t + 1 : t + 1 + K])
    assert sum(position.guided for position in positions) > 4


def test_unguided_drafts_are_accepted_while_the_target_alone_would_write_them(llm, found):
    text, positions = found
    prompt = llm.tokenizer.encode(forced_texts.PROMPT)
    prefixes = [[*prompt, *text[: t + 1]] for t in range(len(positions))]
    plain = SamplingParams(temperature=0.0, max_tokens=K, ignore_eos=True, speculate=False)
    for t, output in enumerate(llm.generate(prefixes, plain, use_tqdm=False)):
        own = output.outputs[0].token_ids
        assert positions[t].unguided == count_equal(positions[t].drafts, own)
        assert positions[t].is_targets == (own[0] == text[t + 1])
    assert {position.guided == position.unguided for position in positions} == {True, False}


def test_a_round_that_leaves_the_text_ends_the_run(llm, found):
    text, _ = found
    params, _ = forced_texts.written(llm, "flat object", 40)
    wrong = [*text[:4], text[4] + 1, *text[5:]]
    with pytest.raises(AssertionError, match="the text is"):
        forced_texts.forced_positions(llm, params, wrong)
