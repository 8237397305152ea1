"""/metrics writes the engine's counts under lasting names, and Python has the same ones."""

from collections import Counter as Counts
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphs.counters import BatchKind, GraphCounters
from graphs.modes import CUDAGraphMode
from specdec import LLM, SamplingParams
from specdec.requests.metrics import Counter, Gauge, Totals, Vector
from specdec.requests.stats import RoundRecord
from specdec.serve.http.measures import Measures

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.fixture
def totals():
    """Two steps, five rounds and a request of three samples."""
    found = Totals()
    found.launched(12)
    found.launched(8)
    for index in (0, 1):
        found.prompt_ended(SimpleNamespace(index=index, prompt_token_ids=[1] * 7))
    for drafts, num_accepted in (((1, 2, 3), 2), ((1, 2, 3), 0), ((1, 2), 2), ((), 0)):
        found.verified(RoundRecord(drafts, num_accepted, 5))
    found.verified(RoundRecord((1, 2, 3), 1, 5, (0, 0, 1)))  # a tree
    found.generated(11)
    stats = SimpleNamespace(num_prompt_tokens=7, num_cached_tokens=3, num_preemptions=1)
    reasons = ("stop", "length", "stop")
    found.ended([SimpleNamespace(stats=stats, finish=SimpleNamespace(reason=r)) for r in reasons])
    return found


def metrics_of(totals):
    batches = {BatchKind(FULL, 8, 8): 3, BatchKind(FULL, 12, 16): 2, BatchKind(NONE, 5, 5): 1}
    graphs = {
        "target_decode": GraphCounters(batches=Counts(batches)),
        "draft_decode": GraphCounters(),
        "target_prefill": GraphCounters(batches=Counts({BatchKind(PIECEWISE, 40, 48): 1})),
    }
    return totals.metrics(
        gauges={
            "num_requests_running": 2,
            "num_requests_waiting": 1,
            "kv_cache_usage_perc": 0.25,
        },
        counts={
            "levels_drafted": 9,
            "tree_rounds": 4,
            "round_tokens_predicted": 30,
            "round_tokens_measured": 28,
        },
        steps={name: counters.sums() for name, counters in graphs.items()},
        num_compilations=2,
    )


def lines_of(text):
    """The engine's part: times are a server's own."""
    return [line for line in text.decode().splitlines() if "_seconds" not in line]


def test_a_fixed_state_is_written_as_ever(totals):
    expected = Path(__file__).with_name("exposition.txt").read_text().splitlines()
    assert lines_of(Measures("demo").text(metrics_of(totals))) == expected


def test_every_kind_of_figure_is_shown_before_there_is_any():
    text = Measures("demo").text(Totals().metrics({}, {}, {}, 0)).decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    names = ("steps", "step_rows", "spec_decode_num_accepted_tokens_per_pos", "prompt_tokens")
    assert {kinds[f"specdec:{name}"] for name in names} == {"counter"}


def test_metrics_of_python_and_of_a_scrape_are_the_same():
    with LLM("demo", {"model": "demo"}, max_num_seqs=2, max_model_len=128, device="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        found = llm.get_metrics()
    told = {}
    for each in found:
        suffix = "" if isinstance(each, Gauge) else "_total"
        rows = enumerate(each.values) if isinstance(each, Vector) else [(None, each.value)]
        for position, value in rows:
            labels = each.labels if position is None else {"position": str(position)}
            told[each.name + suffix, *sorted(labels.items())] = value
    shown = {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(Measures("a").text(found).decode())
        for sample in family.samples
        if "_seconds" not in sample.name
    }
    assert shown == told
    assert any(isinstance(each, Counter) and each.name == "specdec:steps" for each in found)
