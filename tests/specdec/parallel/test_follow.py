"""A runner that follows another holds what it holds, after the steps that a start measures too."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec.parallel.follow import Follow
from specdec.parallel.lead import Lead
from specdec.parallel.messages import Kind
from specdec.parallel.shared import Place, Shared, Stage
from specdec.runner import Runner
from specdec.sizes import EngineSizes, TreeShape
from specdec.start import step_times
from specdec.start.measure_costs import NEVER, measure_costs, measure_round_costs
from tests.specdec.buffer_tensors import buffer_tensors
from tests.specdec.graph_walk import tiny
from tests.specdec.start.test_measure_costs import HostMark

CPU = torch.device("cpu")
TREE = TreeShape(num_levels=3, top_k=2, num_nodes=5)


def adaptive(pair):
    sizes = EngineSizes(
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_kv_blocks=12,
        num_speculative_tokens=3,
        is_adaptive=True,
        tree=TREE,
    )
    return Runner(pair.target, pair.eagle, sizes, CPU, confidence_threshold=None)


def tensors_of(runner):
    """State, buffers and caches."""
    found = vars(runner.state) | vars(runner.state.sampling) | buffer_tensors(runner.buffers)
    found |= {"target": runner.target_cache, "draft": runner.draft_cache}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


class Pair:
    """Rank 0 here, and another rank in a thread."""

    def __init__(self, target):
        pair = tiny(target, CPU)
        self.runner, self.other = adaptive(pair), adaptive(pair)
        self.shared = Shared.of(2)
        os.close(self.shared.file)
        alone = SimpleNamespace(shared=self.shared, check=self.check, failure=None, told=[])
        self.lead = Lead(alone, -1)
        self.follow = Follow(self.shared, 1, -1)
        self.errors = []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def check(self):
        assert not self.errors, self.errors

    def run(self):
        try:
            self.decided = self.follow.led(self.other, lambda: pytest.fail("it decides itself"))
            self.follow.serve({"a plan": self.other}.__getitem__)
        except SystemExit:
            pass
        except BaseException as error:
            self.errors.append(error)
            raise


@pytest.mark.parametrize("target", ["eagle3", "eagle3, experts"])
def test_what_rank_0_measures_is_run_by_all(monkeypatch, target):
    monkeypatch.setattr(step_times, "mark", HostMark)
    ranks = Pair(target)
    ranks.thread.start()
    assert ranks.lead.led(ranks.runner, lambda: 7) == 7
    assert ranks.runner.followers is None
    ranks.lead.build("a plan")
    ranks.runner.followers = ranks.lead
    with ranks.runner.stopping_below(NEVER):
        measure_round_costs(ranks.runner, measure_costs(ranks.runner))
    ranks.lead.serve()
    assert ranks.shared.get(1, Place.STAGE) == Stage.SERVING
    ranks.lead._send(Kind.END)
    ranks.thread.join(30)
    assert ranks.errors == []
    assert ranks.decided == 7
    others = tensors_of(ranks.other)
    for name, each in tensors_of(ranks.runner).items():
        assert torch.equal(each.nan_to_num(), others[name].nan_to_num()), name
    assert ranks.runner.results.latest.number == ranks.other.results.latest.number > 20


def test_what_is_done_beside_rank_0_goes_on_until_it_says_so():
    """Meanwhile the other rank counts as one that waits, and not as one that is stuck."""
    shared = Shared.of(2)
    os.close(shared.file)
    alone = SimpleNamespace(shared=shared, check=lambda: None, failure=None, told=[])
    lead, follow = Lead(alone, -1), Follow(shared, 1, -1)
    lead.build("a plan")
    follow._receive()
    seen = []

    def work(is_at_work):
        seen.append((is_at_work(), shared.get(1, Place.MESSAGES)))
        lead.beside_first(seen.append)
        seen.append(is_at_work())

    follow.beside_first(work)
    assert seen == [(True, 1), None, False]
    assert not follow._ring.has_message
