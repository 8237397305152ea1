"""What is read of a message is what was written, and a step takes some hundred bytes."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from specdec.parallel.messages import (
    Kind,
    Window,
    of_masks,
    of_round,
    of_rows,
    packed,
    to_masks,
    to_round,
    to_rows,
    unpacked,
)
from specdec.requests.params import EVERYTHING, GREEDY, SamplingStart
from specdec.rounds.step_sizes import RowMasks
from specdec.rounds.upload import RowStart
from specdec.scheduling.work import PromptPart, Round
from specdec.sizes import BLOCK_SIZE, IDLE, DraftShape, chain


def through(kind, *values):
    found, rest = unpacked(packed(kind, *values))
    assert found is kind
    return rest


def sent(round, max_seq_len=99, flags=GREEDY, is_guided=False):
    return to_round(through(Kind.STEP, *of_round(round, max_seq_len, flags, is_guided)))


@pytest.mark.parametrize("shape", [chain(5), DraftShape(8, 4, 15)])
@pytest.mark.parametrize("flags", [GREEDY, EVERYTHING])
def test_a_round_arrives_as_it_is(shape, flags):
    round = Round(state_rows=range(3), shape=shape, shared_rows=np.int64(11), next_shape=IDLE)
    found, max_seq_len, found_flags, is_guided = sent(round, np.int64(70), flags, True)
    assert list(found.state_rows) == [0, 1, 2]
    assert (found.shape, found.shared_rows, found.next_shape) == (shape, 11, IDLE)
    assert (found.num_tokens, found.num_decided) == (round.num_tokens, round.num_decided)
    assert (max_seq_len, found_flags, is_guided) == (70, flags, True)


@pytest.mark.parametrize(
    "start, length, is_resumed",
    [(0, 300, False), (64, 100, True), (199, 101, False), (299, 1, False), (200, 99, True)],
)
def test_a_part_of_a_prompt_has_what_a_step_reads_of_it(start, length, is_resumed):
    prompt = array("q", np.random.default_rng(0).integers(1 << 40, size=300))
    part = PromptPart(
        state_row=4,
        prompt=prompt,
        start=start,
        length=length,
        blocks=[7, 3, 12, 5, 1],
        num_logprobs=2,
        is_resumed=is_resumed,
    )
    [found] = sent(Round(next_shape=chain(2), parts=[part]))[0].parts
    end = start + length
    for first, last in ((start, end), (start + 1, end + 1)):
        assert list(found.prompt[first:last]) == list(prompt[first:last])
    assert (found.ends_prompt, found.samples) == (part.ends_prompt, part.samples)
    places = np.arange(start, end) // BLOCK_SIZE
    assert (np.asarray(found.blocks)[places] == np.asarray(part.blocks)[places]).all()
    others = ("state_row", "start", "length", "num_logprobs", "is_resumed")
    assert [getattr(found, name) for name in others] == [getattr(part, name) for name in others]


def test_tokens_that_were_not_sent_are_not_read():
    window = Window(10, 4, [14, 15, 16])
    assert len(window) == 10
    assert (window[5], list(window[4:7]), list(window[10:12])) == (15, [14, 15, 16], [])
    for wrong in (slice(3, 5), slice(5, 8), slice(4, 7, 2), 7, slice(None)):
        with pytest.raises(IndexError):
            window[wrong]


def test_state_rows_arrive_as_they_are():
    sampling = SamplingStart(
        temperature=0.5,
        seed=(1 << 64) - 1,
        logit_bias={3: -1.5},
        allowed_token_ids=[1, 2],
        bad_words=[[4, 5], [6]],
        prompt=[9, 8],
    )
    start = RowStart(blocks=[2, 5], num_draft_tokens=3, stop_ids=[7], sampling=sampling)
    greedy = RowStart(blocks=[], num_draft_tokens=0, sampling=SamplingStart(prompt=range(4)))
    starts, grown = [(1, start), (0, greedy)], [(2, 1, 9)]
    assert to_rows(through(Kind.ROWS, *of_rows(starts, grown))) == (starts, grown)


def test_of_a_prompt_that_the_sampler_does_not_read_only_the_length_is_sent():
    long = RowStart(blocks=[1], num_draft_tokens=0, sampling=SamplingStart(prompt=[1 << 40] * 5000))
    message = packed(Kind.ROWS, *of_rows([(3, long)], []))
    assert len(message) < 700
    [(row, found)], _ = to_rows(unpacked(message)[1])
    assert (row, len(found.sampling.prompt)) == (3, 5000)
    penalties = replace(long.sampling, presence_penalty=0.5)
    starts = [(3, replace(long, sampling=penalties))]
    assert to_rows(through(Kind.ROWS, *of_rows(starts, []))) == (starts, [])


def test_masks_arrive_as_they_are():
    masks = RowMasks(np.array([5, 0]), np.arange(8, dtype=np.int32).reshape(2, 4) - 3)
    found = to_masks(through(Kind.MASKS, *of_masks(masks)))
    for one, other in zip(masks, found, strict=True):
        assert one.dtype == other.dtype
        assert (one == other).all()
        assert other.flags.writeable  # torch warns of others


def test_a_step_takes_some_hundred_bytes_and_nothing_but_plain_data():
    round = Round(state_rows=list(range(64)), shape=chain(5), next_shape=chain(5))
    assert len(packed(Kind.STEP, *of_round(round, 4096, EVERYTHING, False))) < 700
    with pytest.raises(ValueError, match="unmarshallable"):
        packed(Kind.STEP, round)
