"""What /metrics says, and what the log says."""

import json
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.requests.output import RequestOutput
from specdec.serve.http.measures import ROUNDS, Monitor, Record
from weights.demo import demo_directory


@pytest.fixture
def greedy_target(tmp_path):
    """The bundled target with a generation_config.json that recommends temperature 0."""
    for file in demo_directory("target").iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.0}')
    return tmp_path


def families_of(live):
    found = live.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(found.text)}


def value(families, name, **labels):
    samples = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == f"specdec:{name}" and labels.items() <= sample.labels.items()
    ]
    return sum(samples)


def test_figures_are_the_sums_of_the_answers(serve, prompts):
    jobs = list(zip(prompts, (3, 9, 20, 14, 30, 7), (1, 2, 1, 1, 3, 1), strict=False))
    with serve(model_names=("first", "second")) as live, ThreadPoolExecutor(4) as clients:
        running = [
            clients.submit(
                live.completion, ids[:40], max_tokens=length, seed=1, ignore_eos=True, n=n
            )
            for ids, length, n in jobs
        ]
        answers = [each.result() for each in running]
        families = families_of(live)
    usage = [answer["usage"] for answer in answers]
    details = [each["completion_tokens_details"] for each in usage]
    accepted = sum(each["accepted_prediction_tokens"] for each in details)
    rejected = sum(each["rejected_prediction_tokens"] for each in details)
    sums = {
        "prompt_tokens_total": sum(each["prompt_tokens"] for each in usage),
        "generation_tokens_total": sum(each["completion_tokens"] for each in usage),
        "spec_decode_num_accepted_tokens_total": accepted,
        "spec_decode_num_draft_tokens_total": accepted + rejected,
        "spec_decode_num_accepted_tokens_per_pos_total": accepted,
        "request_success_total": 9,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "compilations_after_start_total": 0,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 6,
        "e2e_request_latency_seconds_count": 6,
    }
    assert {name: value(families, name) for name in sums} == sums
    assert value(families, "request_success_total", finished_reason="length") == 9
    assert (
        0
        < value(families, "time_to_first_token_seconds_sum")
        < (value(families, "e2e_request_latency_seconds_sum"))
    )
    drafts = value(families, "spec_decode_num_drafts_total")
    assert value(families, "inter_token_latency_seconds_count") <= drafts
    # on a CPU no step runs ahead, so every row that was computed belongs to a round: K = 3 and one
    assert value(families, "rows_verified_total") == 4 * drafts
    assert value(families, "rows_verified_total") == drafts + accepted + rejected
    names = ("target_decode", "target_prefill")  # steps without and with prompts
    rows = sum(value(families, "step_rows_total", family=name) for name in names)
    assert rows > value(families, "rows_verified_total")
    proposing = value(families, "steps_total", family="draft_decode")
    assert value(families, "levels_drafted_total") == 3 * proposing > 0


def test_kinds_and_labels(live):
    families = families_of(live)
    kinds = {
        "num_requests_running": "gauge",
        "prompt_tokens": "counter",
        "time_to_first_token_seconds": "histogram",
        "steps": "counter",
        "rows_verified": "counter",
        "levels_drafted": "counter",
        "compilations_after_start": "counter",
        "num_preemptions": "counter",
        "spec_decode_num_accepted_tokens_per_pos": "counter",
    }
    assert {name: families[f"specdec:{name}"].type for name in kinds} == kinds
    ours = [family for name, family in families.items() if name.startswith("specdec:")]
    assert all(sample.labels["model_name"] == "demo" for each in ours for sample in each.samples)


def test_a_line_of_the_log_says_what_runs(live, caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    monitor = Monitor(live.llm)
    figures = {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.25}
    figures |= {"generation_tokens": 21, "spec_decode_num_drafts": 9}
    figures |= {"spec_decode_num_draft_tokens": 30, "spec_decode_num_accepted_tokens": 12}
    monitor.look(figures)
    assert "2 running, 1 waiting" in caplog.text
    assert "40% accepted, cache 25%" in caplog.text
    caplog.clear()
    monitor.look({**figures, "num_requests_running": 0, "num_requests_waiting": 0})
    assert caplog.text == ""


def test_the_alarm_rings_when_acceptance_falls_under_a_third():
    watch = Monitor(None)
    assert watch.alarm(ROUNDS, 300) is None  # 1.5 a round
    assert watch.alarm(ROUNDS + 1, 300) is None  # too few to judge
    assert watch.alarm(2 * ROUNDS, 410) is None  # 0.55
    assert "0.45 accepted drafts a round, 1.50 at the start" in watch.alarm(3 * ROUNDS, 500)
    assert watch.alarm(4 * ROUNDS, 590) is None  # it has rung
    assert watch.alarm(5 * ROUNDS, 900) is None
    assert watch.alarm(6 * ROUNDS, 910) is not None


def test_sampling_defaults_of_the_checkpoint_are_taken_where_the_operator_says_so(
    serve, greedy_target
):
    with serve(model=greedy_target, use_generation_config=True) as live:
        texts = {live.completion("def f(x):")["choices"][0]["text"] for _ in range(3)}
        assert live.server.application.defaults["temperature"] == 0.0
        assert (
            live.completion("def f(x):", temperature=1, seed=1)["choices"][0]["text"] not in texts
        )
    assert len(texts) == 1


def test_finished_requests_are_recorded_where_the_operator_says_so(serve, tmp_path):
    with serve(record=tmp_path / "seen") as live:
        answer = live.completion("def f(", max_tokens=5, n=2, seed=1, return_token_ids=True)
    [file] = (tmp_path / "seen").iterdir()
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert json.loads(file.read_text())["token_ids"] == ids


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_record_is_for_its_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        record = Record(tmp_path / "new" / "seen")
    finally:
        os.umask(before)
    record.close()
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (record.file, record.file.parent)]
    assert modes == [0o600, 0o700]


def test_a_full_disk_ends_the_record_and_no_answer(tmp_path, caplog):
    record = Record(tmp_path)
    record._stream.close()
    record._stream = open("/dev/full", "w")  # noqa: SIM115
    for _ in range(2):
        record.write(RequestOutput("1", None, [5], [], True))
    [message] = caplog.messages
    assert "no longer recorded" in message
    assert "No space left" in message
    record.close()


def test_a_dead_engine_is_a_503_everywhere(serve, monkeypatch):
    with serve() as live:

        def fail(*_):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(live.llm.llm.engine, "step", fail)
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": "y"}),
        ):
            found = live.post(path, body)
            assert found.status_code == 503
            assert "the device is gone" in found.json()["error"]["message"]
        assert live.get("/health").status_code == live.get("/metrics").status_code == 503
