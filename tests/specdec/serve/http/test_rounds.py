"""What `show_drafts` adds to an answer: its rounds, which sum up to its text, tokens and usage."""

import json

import pytest

from specdec import SamplingParams

SAMPLED = {"temperature": 0.8, "seed": 7, "max_tokens": 60, "ignore_eos": True}
PATHS = {
    "/v1/completions": {"prompt": "def f(x):"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f(x):"}]},
}


def rounds_of(live, path, is_stream, **fields):
    """The rounds of a choice with its text, its token ids, and usage."""
    body = {**PATHS[path], **SAMPLED, "show_drafts": True, "return_token_ids": True, **fields}
    if not is_stream:
        found = live.post(path, body)
        assert found.status_code == 200, found.text
        [choice] = found.json()["choices"]
        return choice["rounds"], text_of(choice), choice["token_ids"], found.json()["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = [line for line in live.post(path, body).text.splitlines() if line]
    *chunks, last = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    rounds = [each for choice in choices for each in choice["rounds"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    return rounds, "".join(map(text_of, choices)), ids, last["usage"]


def text_of(choice):
    """Of a completion, a message or a delta."""
    if "text" in choice:
        return choice["text"]
    return choice["message" if "message" in choice else "delta"]["content"]


def kept(rounds):
    """The spans that are not of rejected drafts."""
    return [span for each in rounds for span in each["spans"] if span["kind"] != "rejected"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "is_stream, stop",
    [
        (True, "_c_"),  # of three tokens, whose text is held back
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, "_c_", marks=pytest.mark.slow),
    ],
)
def test_the_rounds_sum_up_to_the_answer(live, path, is_stream, stop):
    rounds, text, ids, usage = rounds_of(live, path, is_stream, stop=stop)
    assert "".join(span["text"] for span in kept(rounds)) == text
    assert [token for span in kept(rounds) for token in span["token_ids"]] == ids
    details = usage["completion_tokens_details"]
    accepted = sum(each["num_accepted"] or 0 for each in rounds)
    drafted = sum(each["num_drafted"] or 0 for each in rounds)
    assert accepted == details["accepted_prediction_tokens"] > 0
    assert drafted - accepted == details["rejected_prediction_tokens"] > 0


def test_the_kinds_of_a_round_follow_from_its_counts(live):
    rounds, *_ = rounds_of(live, "/v1/completions", False)
    assert [span["kind"] for span in rounds[0]["spans"]] == ["target"]
    assert rounds[0]["num_drafted"] is None
    seen = set()
    for each in rounds[1:-1]:
        sizes = {span["kind"]: len(span["token_ids"]) for span in each["spans"]}
        accepted = each["num_accepted"]
        wanted = {"accepted": accepted} if accepted else {}
        wanted |= {"bonus": 1} if accepted == 3 else {"rejected": 3 - accepted, "recovered": 1}
        assert sizes == wanted
        seen |= set(sizes)
    assert seen == {"accepted", "rejected", "recovered", "bonus"}


@pytest.mark.slow
def test_without_speculation_each_token_is_the_targets_and_the_text_is_the_same(live):
    drafted, plain = (
        rounds_of(live, "/v1/completions", True, speculate=each) for each in (True, False)
    )
    assert plain[1:3] == drafted[1:3]
    assert {span["kind"] for each in plain[0] for span in each["spans"]} == {"target"}
    assert {each["num_drafted"] for each in plain[0][1:]} == {0}


def test_they_are_the_rounds_that_the_engine_reports(live):
    rounds, *_ = rounds_of(live, "/v1/completions", False)
    params = SamplingParams(**SAMPLED)

    async def last():
        async for output in live.llm.generate("def f(x):", params):
            found = output
        return found.stats.rounds

    records = live.run(last())
    assert [(each["num_drafted"], each["num_accepted"]) for each in rounds[1:]] == [
        (len(record.draft_tokens), record.num_accepted) for record in records
    ]
    for each, record in zip(rounds[1:-1], records[:-1], strict=True):
        drafts = [
            token
            for span in each["spans"]
            if span["kind"] in ("accepted", "rejected")
            for token in span["token_ids"]
        ]
        assert tuple(drafts) == record.draft_tokens


def test_characters_of_several_tokens_are_in_the_rounds_once(live):
    # the bytes of a character come as tokens of their own, at most K + 1 in a round
    ids = live.post("/tokenize", {"prompt": "\N{SNOWMAN}"}).json()["tokens"]
    assert len(ids) > 1
    bias = {str(token): 100 for token in ids}
    rounds, text, found, _ = rounds_of(
        live, "/v1/completions", True, logit_bias=bias, max_tokens=9, temperature=1
    )
    assert "\N{REPLACEMENT CHARACTER}" in text or "\N{SNOWMAN}" in text
    assert "".join(span["text"] for span in kept(rounds)) == text
    assert [token for span in kept(rounds) for token in span["token_ids"]] == found


def test_a_prompt_of_a_list_has_its_own_rounds(live):
    fields = {**SAMPLED, "show_drafts": True, "return_token_ids": True}
    together = live.completion(["def f(x):", "class A:"], **fields)["choices"]
    for prompt, choice in zip(["def f(x):", "class A:"], together, strict=True):
        [alone] = live.completion(prompt, **fields)["choices"]
        assert choice["rounds"] == alone["rounds"]


def test_answers_have_no_rounds_unless_asked_for(live):
    assert "rounds" not in live.completion("def f(x):", max_tokens=2)["choices"][0]
    scored = live.completion("def f(x):", max_tokens=0, echo=True, show_drafts=True)
    assert scored["choices"][0]["rounds"] == []


def test_several_samples_are_refused(live):
    found = live.post("/v1/completions", {"prompt": "x", "n": 2, "show_drafts": True})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "show_drafts")
    assert "n=2" in found.json()["error"]["message"]
