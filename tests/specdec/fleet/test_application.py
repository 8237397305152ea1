"""Two replicas of the bundled pair on Ray Serve: OpenAI's client, and what it sees of a death."""

import inspect
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace

import pytest
from openai import APIConnectionError, AuthenticationError, InternalServerError, OpenAI

from specdec import LLM, SamplingParams
from specdec.config import EngineConfig
from specdec.serve.http.options import ServerOptions
from tests.served import free_port

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DRAFT = {"model": "demo", "num_speculative_tokens": 3}
SIZES = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512}
PROMPT = "def fibonacci(n):"
MESSAGES = [{"role": "user", "content": PROMPT}]
LONG = {"max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(cluster):
    """Where the proxy listens."""
    from ray import serve

    from specdec.fleet import build_app

    port = free_port()
    serve.start(http_options={"port": port})
    server = {"api_key": "secret", "model_names": ["demo", "alias"]}
    args = {"model": "demo", "speculative_config": DRAFT, "server": server, **SIZES}
    serve.run(build_app({**args, "deployment": {"num_replicas": 2}}))
    yield f"http://127.0.0.1:{port}/v1"
    serve.shutdown()


@pytest.fixture
def client(url):
    with OpenAI(base_url=url, api_key="secret", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", DRAFT, **SIZES) as found:
        yield found


def written(llm, **params: object) -> str:
    """What LLM writes."""
    return llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text


def replicas() -> list[str]:
    """The names of those that run."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in actors if each["name"].startswith("SERVE_REPLICA::")]


def kill(name: str) -> None:
    """As if its process had crashed."""
    import ray

    ray.kill(ray.get_actor(name, namespace="serve"))


def until_two_run() -> None:
    """Ray starts others for those that have died."""
    from ray import serve

    end = time.monotonic() + 60
    while True:
        status = serve.status().applications["default"].deployments["specdec"]
        if len(replicas()) == 2 and status.replica_states == {"RUNNING": 2}:
            return
        assert time.monotonic() < end, status
        time.sleep(0.2)


def ask(client: OpenAI, **fields: object):
    """A completion, with how often the client has asked again."""
    extra = {name: fields.pop(name) for name in ("ignore_eos",) if name in fields}
    found = client.completions.with_raw_response.create(
        model="demo", prompt=PROMPT, extra_body=extra, **fields
    )
    return found.parse().choices[0].text, found.retries_taken


def test_openais_client_gets_what_llm_writes(client, llm):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: ask(client, seed=seed, max_tokens=24)[0], range(8)))
    assert found == [written(llm, seed=seed, max_tokens=24) for seed in range(8)]
    chat = client.chat.completions.create(model="alias", messages=MESSAGES, seed=7, max_tokens=12)
    expected = llm.chat(MESSAGES, SamplingParams(seed=7, max_tokens=12), use_tqdm=False)[0]
    assert chat.choices[0].message.content == expected.outputs[0].text
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_stream_comes_in_pieces(client, llm):
    chunks = list(
        client.completions.create(model="demo", prompt=PROMPT, seed=3, max_tokens=40, stream=True)
    )
    assert len(chunks) > 5
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == written(llm, seed=3, max_tokens=40)


def test_the_key_is_asked_for(url):
    with OpenAI(base_url=url, api_key="other") as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_requests_of_a_killed_replica_are_asked_again_by_the_client(url, llm):
    until_two_run()
    with (
        OpenAI(base_url=url, api_key="secret", max_retries=4) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(ask, client, seed=seed, **LONG) for seed in range(8)]
        time.sleep(0.5)
        assert not any(each.done() for each in asked)
        kill(replicas()[0])
        found = [each.result(120) for each in asked]
    assert [text for text, _ in found] == [written(llm, seed=seed, **LONG) for seed in range(8)]
    assert sum(retries for _, retries in found) > 0


def test_what_a_client_sees_of_a_killed_replica(client, llm):
    until_two_run()
    whole = written(llm, seed=1, **LONG)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, client, seed=1, **LONG)
        chunks = client.completions.create(
            model="demo",
            prompt=PROMPT,
            seed=1,
            max_tokens=240,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        seen = [next(chunks).choices[0].text for _ in range(3)]
        for name in replicas():
            kill(name)
        with pytest.raises(APIConnectionError):
            seen += [chunk.choices[0].text for chunk in chunks]
        with pytest.raises(InternalServerError):
            asked.result(60)
    assert whole.startswith("".join(seen))
    assert len("".join(seen)) < len(whole)
    assert ask(client, seed=1, **LONG)[0] == whole  # waits for a new replica


def test_a_replica_whose_engine_has_failed_is_unhealthy():
    from specdec.fleet.application import EngineReplica

    check = EngineReplica.check_health
    check(SimpleNamespace(_llm=SimpleNamespace(is_well=True)))
    with pytest.raises(RuntimeError, match="the engine has failed"):
        check(SimpleNamespace(_llm=SimpleNamespace(is_well=False)))


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"model": None}, "model=None: give a directory"),
        ({"max_num_sqes": 4}, "did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"speculative_config": {"model": "demo", "k": 3}}, "SpeculativeConfig does not take k"),
        ({"speculative_config": "demo"}, "speculative_config='demo': give a dict"),
        ({"server": {"shutdown_timeout": 3}}, "server does not take shutdown_timeout"),
        ({"server": {"api_key": ""}}, "api_key: give a key"),
        ({"server": {"max_waiting": -1}}, "max_waiting=-1: give an integer"),
        ({"server": {"chat_template": 3}}, "chat_template=3"),
        ({"deployment": {"num_replica": 2}}, "did you mean num_replicas"),
    ],
)
def test_mistakes_are_seen_where_they_are_made(changed, words):
    from specdec.fleet import build_app

    with pytest.raises(ValueError, match=re.escape(words)):
        build_app({"model": "demo", **changed})


def test_every_option_of_an_engine_is_taken():
    from specdec.fleet import EngineStage, build_app
    from specdec.fleet.stage import STAGE_OPTIONS

    defaults = {each.name: each.default for each in fields(EngineConfig)}
    assert (
        defaults.items()
        <= {
            name: each.default for name, each in inspect.signature(EngineStage).parameters.items()
        }.items()
    )
    build_app({"model": "demo", **defaults})
    assert set(STAGE_OPTIONS) <= {each.name for each in fields(ServerOptions)}


def test_a_replica_has_a_gpu_and_others_are_added_by_what_waits():
    from specdec.fleet import build_app

    def deployment(**args: object):
        return build_app({"model": "demo", **args})._bound_deployment

    found = deployment(deployment={"autoscaling_config": {"max_replicas": 3}}, max_num_seqs=32)
    assert found.ray_actor_options["num_gpus"] == 1
    assert found.max_ongoing_requests == 64
    scaling = found._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.target_ongoing_requests == 32
    assert deployment(tensor_parallel_size=2).ray_actor_options["num_gpus"] == 2
    fixed = deployment(device="cpu", deployment={"num_replicas": 2, "max_ongoing_requests": 5})
    assert fixed.ray_actor_options["num_gpus"] == 0
    assert (fixed.num_replicas, fixed.max_ongoing_requests) == (2, 5)
    assert fixed._deployment_config.autoscaling_config is None
