"""Which rows of a tree get which masks: one for each row, whatever leaves lie under it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from specdec.guided import step_masks
from specdec.guided.step_masks import GuidedSlot, StepMasks, row_masks
from specdec.rounds.results import Proposals
from specdec.sizes import PLAIN, chain

TOKENS, PARENTS = [5, 6, 7, 8], [0, 0, 1, 1]  # leaves: 2, and 3 and 4 under 1


class FakeGuide:
    """Allows a token number of its own after each prefix; nothing once it is given up."""

    def __init__(self, gives_up_at=None, num_parts=1):
        self.gives_up_at = gives_up_at
        self.num_parts = num_parts
        self.is_given_up = False
        self.found = []

    def parts(self, first, end):
        return [(row, self) for row in range(first, end)[: self.num_parts]]

    def masks(self, drafts, first):
        self.is_given_up = self.is_given_up or tuple(drafts) == self.gives_up_at
        if self.is_given_up:
            return [bytes(4)]
        prefixes = [tuple(drafts[:i]) for i in range(first, len(drafts) + 1)]
        self.found += prefixes
        return [(1 + sum(prefix)).to_bytes(4, "little") for prefix in prefixes]


THREADS = SimpleNamespace(masks=lambda walks: [guide.masks(*rows) for guide, *rows in walks])


def masks_of(guide, num_levels=2, num_rows=5):
    arrived = SimpleNamespace(read_proposals=lambda: Proposals([[], TOKENS], [[], PARENTS]))
    found = row_masks(THREADS, [GuidedSlot(guide, 10, num_rows, num_levels, (arrived, 1))])
    values = found.bits_XW.view(np.uint32)[:, 0].tolist()
    return dict(zip(found.row_X.tolist(), values, strict=True))


def test_each_row_has_the_mask_after_its_own_path():
    assert masks_of(FakeGuide()) == {10: 1, 11: 6, 12: 7, 13: 13, 14: 14}
    assert masks_of(FakeGuide(), num_levels=1) == {10: 1, 11: 6, 12: 7}
    assert masks_of(FakeGuide(), num_rows=4) == {10: 1, 11: 6, 12: 7, 13: 13}


def test_the_mask_of_a_row_is_found_once():
    guide = FakeGuide()
    masks_of(guide)
    assert sorted(guide.found) == [(), (5,), (5, 7), (5, 8), (6,)]


def test_parts_of_a_walk_have_rows_of_their_own():
    guide = FakeGuide(num_parts=2)
    assert masks_of(guide) == masks_of(FakeGuide())
    assert sorted(guide.found) == [(), (5,), (5, 7), (5, 8), (6,)]


def test_a_guide_that_is_given_up_on_a_later_leaf_allows_nothing_from_the_root_on():
    assert masks_of(FakeGuide(gives_up_at=(5, 8)))[10] == 0


class FakeRequest:
    def __init__(self):
        self.guide = FakeGuide()


@pytest.mark.parametrize("has_prompt", [True, False])
def test_beside_prompts_masks_are_found_while_the_step_is_launched(has_prompt, monkeypatch):
    began = threading.Event()
    monkeypatch.setattr(step_masks, "row_masks", lambda *_: began.set() or "found")
    request = FakeRequest()
    parts = [SimpleNamespace(samples=True)] if has_prompt else []
    work = SimpleNamespace(
        verifying=[request],
        shape=chain(3),
        most_drafts=3,
        prompts=[request] * has_prompt,
        parts=parts,
    )
    masks = StepMasks().of_step(work, lambda _: 3)
    assert began.wait(5 if has_prompt else 0.1) == has_prompt
    assert masks() == "found"


def test_what_fails_early_is_raised_where_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(step_masks, "row_masks", lambda *_: 1 / 0)
    request = FakeRequest()
    work = SimpleNamespace(
        verifying=[], shape=PLAIN, prompts=[request], parts=[SimpleNamespace(samples=True)]
    )
    masks = StepMasks().of_step(work, lambda _: 0)
    with pytest.raises(ZeroDivisionError):
        masks()
