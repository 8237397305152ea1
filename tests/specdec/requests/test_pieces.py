"""Pieces of a request, in whatever groups they are joined, are what it has written."""

import random

import pytest

from specdec.requests.output import CompletionOutput, Logprob, RequestOutput
from specdec.requests.params import SamplingParams
from specdec.requests.request import FinishRules, Pieces, Request, whole_output
from specdec.requests.stats import RequestStats, RoundRecord
from specdec.requests.tokenizer import Detokenizer


class Characters:
    """A tokenizer whose tokens are code points."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))


def request_of(num_samples):
    """A request whose samples are not begun."""
    params = SamplingParams(n=num_samples, logprobs=1, prompt_logprobs=0, seed=4)
    samples = [
        Request(
            request_id="7",
            prompt="ab",
            prompt_token_ids=[97, 98],
            params=params,
            rules=FinishRules(max_tokens=60, stop_strings=("xyzv",)),
            detokenizer=Detokenizer(Characters()),
            stats=RequestStats(num_prompt_tokens=2, arrival_time=1.0),
            index=index,
        )
        for index in range(num_samples)
    ]
    for sample in samples if num_samples > 1 else ():
        sample.samples = samples
    return samples[0]


def grow(sample, letters, now):
    """A round that accepts all but the last letter."""
    tokens = [ord(each) for each in letters]
    sample.logprobs += [{token: Logprob(-token / 64, 1, chr(token))} for token in tokens]
    sample.stats.add_round(RoundRecord(tuple(tokens[:-1]), len(tokens) - 1, tokens[-1]))
    sample.append(tokens, now)


def random_steps(request, draw):
    """Let some samples grow at a time, until all have ended; yields after each step."""
    for now in range(2, 200):
        running = [sample for sample in request.all_samples if sample.finish is None]
        if not running:
            return
        for sample in draw.sample(running, draw.randint(1, len(running))):
            grow(sample, draw.choices("vwxyz", k=draw.randint(1, 4)), float(now))
        if now == 9:
            running[0].stats.num_preemptions += 1
        yield


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_joined_in_any_groups_are_the_whole(num_samples, seed):
    request, draw = request_of(num_samples), random.Random(seed)
    reader = Pieces(request)
    groups: list[RequestOutput] = []
    is_fetched = True
    for _ in random_steps(request, draw):
        request.all_samples[0].prompt_logprobs = [None, {98: Logprob(-1.0, 1, "b")}]
        new = reader.output()
        if is_fetched:
            groups.append(new)
        else:  # as for a slow reader
            groups[-1].add(new)
        is_fetched = draw.random() < 0.5
    whole = groups[0].copy()
    for each in groups[1:]:
        whole.add(each)
    expected = whole_output(request)
    assert whole == expected
    assert [each.stats for each in whole.outputs] == [each.stats for each in expected.outputs]
    assert (whole.stats, whole.finished) == (expected.stats, True)
    assert len(groups) > 3
    assert [each.prompt for each in groups] == ["ab"] + [None] * (len(groups) - 1)
    assert [each.prompt_token_ids for each in groups[1:]] == [[]] * (len(groups) - 1)


def test_an_output_has_the_samples_that_have_grown_and_the_first_has_all():
    request = request_of(2)
    reader = Pieces(request)
    first, second = request.all_samples
    grow(second, "vw", 2.0)
    assert [each.text for each in reader.output().outputs] == ["", "vw"]
    grow(first, "v", 3.0)
    [piece] = reader.output().outputs
    assert (piece.index, piece.text, piece.token_ids) == (0, "v", [118])
    second.end("abort")
    [piece] = reader.output().outputs
    assert (piece.index, piece.text, piece.finish_reason) == (1, "", "abort")
    first.end("abort")
    assert [each.index for each in reader.output().outputs] == [0]
    assert list(reader.new()) == []


def test_a_copy_does_not_grow():
    request = request_of(1)
    reader = Pieces(request)
    grow(request, "v", 2.0)
    whole = reader.output()
    before = whole.copy()
    grow(request, "w", 3.0)
    whole.add(reader.output())
    assert (before.outputs[0].text, before.outputs[0].token_ids) == ("v", [118])
    assert (before.stats.num_rounds, before.stats.num_generated_tokens) == (1, 1)
    assert len(before.outputs[0].logprobs) == 1
    assert whole.outputs[0].text == "vw"
    assert whole.stats.num_rounds == 2


def test_an_output_without_samples_has_empty_statistics():
    assert RequestOutput("0", None, [], [], False).stats == RequestStats()
    assert RequestOutput("0", None, [], [CompletionOutput(0, "", [])], False).num_cached_tokens == 0
