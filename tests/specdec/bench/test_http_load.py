"""The open loop against a server: arrivals, what is measured, and what counts as an answer."""

import asyncio
import itertools
import json
import statistics

import httpx2
import pytest

from specdec.bench.charts import draw_charts
from specdec.bench.http_load import Api, Timing, arrivals, figures, listed_models, num_tokens, timed
from specdec.bench.options import LoadOptions

API = Api(url="http://x", model="m", is_chat=False, api_key="k", fields={"temperature": 0})
ROOM = 1 << 20  # tokens


def plan_of(rate, count, seed, tokens_per_word=2.0, room=ROOM, most_answer=None):
    options = LoadOptions(url="http://x", num_requests=count, max_tokens=most_answer, seed=seed)
    return list(arrivals(options, rate, tokens_per_word, room))


def answer_of(handler):
    """What `timed` says of a server."""

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as client:
            return await timed(client, API, "a b", 3)

    return asyncio.run(run())


def stream(*events):
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx2.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def test_arrivals_are_a_poisson_process_with_the_means_of_sharegpt():
    plan = plan_of(4.0, 4000, seed=1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    # cut at 1,024, which takes some of the mean
    assert 140 < statistics.mean(2 * len(each.prompt.split()) for each in plan) < 230
    assert 150 < statistics.mean(each.max_tokens for each in plan) < 210


def test_times_and_lengths_follow_from_the_seed_and_prompts_are_new():
    one, two = (plan_of(1.0, 9, seed=5) for _ in range(2))
    assert [(each.at, each.max_tokens) for each in one] == [
        (each.at, each.max_tokens) for each in two
    ]
    assert [len(each.prompt.split()) for each in one] == [len(each.prompt.split()) for each in two]
    assert one[0].prompt != two[0].prompt


def test_a_request_fits_into_the_context_that_the_server_lists():
    plan = plan_of(1.0, 500, seed=0, tokens_per_word=1.0, room=128, most_answer=20)
    assert max(len(each.prompt.split()) for each in plan) <= 60
    assert max(each.max_tokens for each in plan) == 20


def test_a_server_that_does_not_answer_in_time_is_named_with_the_error():
    async def ask():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(too_late)) as client:
            await listed_models(client, API)

    def too_late(request):
        raise httpx2.ConnectTimeout("")

    with pytest.raises(ValueError, match=r"^http://x/v1/models: ConnectTimeout$"):
        asyncio.run(ask())


def test_an_answer_is_timed_by_its_deliveries():
    seen = {}

    def handler(request):
        seen.update(json.loads(request.content), key=request.headers["authorization"])
        return stream(
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": ""}]},
            {"choices": [{"text": "b", "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        )

    found = answer_of(handler)
    assert (len(found.deliveries), found.num_tokens, found.error) == (2, 3, None)
    assert (seen["temperature"], seen["max_tokens"], seen["key"]) == (0, 3, "Bearer k")


@pytest.mark.parametrize(
    "response, words",
    [
        (httpx2.Response(503, text="busy"), "status 503: busy"),
        (stream({"choices": [{"text": "a"}]}), "ended before the answer"),
        (stream({"error": {"message": "gone"}}), "gone"),
        (httpx2.Response(200, text="data: {oops\n\n"), "JSONDecodeError"),
    ],
)
def test_what_is_no_answer_counts_as_failed(response, words):
    assert words in answer_of(lambda request: response).error


def test_an_answer_without_text_is_timed_by_its_end():
    event = {"choices": [{"text": "", "finish_reason": "stop"}]}
    found = answer_of(lambda request: stream(event))
    assert found.error is None
    assert found.deliveries == [found.ended]


def test_a_server_without_usage_cannot_be_measured():
    async def run():
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json={"choices": []}))
        async with httpx2.AsyncClient(transport=transport) as client:
            await num_tokens(client, API, "a b")

    with pytest.raises(ValueError, match=r"without usage.prompt_tokens"):
        asyncio.run(run())


def test_figures_of_a_run():
    timings = [
        Timing(sent=0.0, deliveries=[0.1, 0.2, 0.4], ended=0.5, num_tokens=7, is_finished=True),
        Timing(sent=1.0, deliveries=[1.3], ended=2.0, num_tokens=1, is_finished=True),
        Timing(sent=1.5, ended=1.6, error="status 503"),
    ]
    row = figures(2.0, timings, [0.0, 0.001, 0.0], {"ttft": 150.0, "tpot": 60.0})
    assert (row["num_requests"], row["num_failed"], row["first_error"]) == (3, 1, "status 503")
    assert row["requests_per_second"] == 1.0
    assert row["tokens_per_second"] == 4.0
    assert row["goodput"] == 0.5  # one answer in two seconds
    assert row["ttft_ms_p50"] == pytest.approx(200)
    assert row["itl_ms_p50"] == pytest.approx(150)
    assert row["tpot_ms_p99"] == pytest.approx(50)
    assert row["e2e_ms_p50"] == pytest.approx(750)


def test_the_chart_names_server_model_and_date(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "supxlabel", lambda _, text, **__: drawn.append(text))
    row = {f"{name}_ms_p{p}": 5.0 for name in ("ttft", "itl") for p in (50, 99)}
    rows = [row | {"request_rate": rate} for rate in (1.0, 2.0)]
    [file] = draw_charts({"serve": rows}, tmp_path, "url; model; date")
    assert file.name == "serve.png"
    assert drawn == ["url; model; date"]
