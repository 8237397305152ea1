"""Every option of an engine, its draft and a server is on the command line, and reaches its field.

The fields of the configs are walked, so that no option can be in one place and missing in another.
"""

from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import specdec.cli.bench as cli_bench
from specdec.bench.options import BenchOptions
from specdec.cli import app
from specdec.cli.command import parameter_name, taken_by
from specdec.config import EngineConfig
from specdec.described import ENGINES, Described, described
from specdec.serve.http.options import ServerOptions
from specdec.sizes import TreeShape
from specdec.speculative_config import SpeculativeConfig

CONFIGS = (EngineConfig, SpeculativeConfig, ServerOptions)
WORDS = {
    "generate": ("generate", "demo", "x"),
    "chat": ("chat", "demo"),
    "verify": ("verify", "demo", "demo"),
    "serve": ("serve", "demo"),
    "batch": ("batch", __file__, "out.jsonl", "demo"),
}
# of each option: what is given, and the value that its field then has
GIVEN = {
    "dtype": ("bfloat16", "bfloat16"),
    "device": ("cpu", "cpu"),
    "max_model_len": ("99", 99),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("77", 77),
    "max_prompt_slowdown": ("2.5", 2.5),
    "gpu_memory_utilization": ("0.5", 0.5),
    "num_kv_blocks": ("5", 5),
    "enforce_eager": (None, True),
    "cuda_graph_sizes": ("1,2", [1, 2]),
    "cuda_graph_token_sizes": ("64,256", [64, 256]),
    "compile_piecewise": (None, True),
    "cuda_graph_modes": (
        "target_decode=NONE,draft_decode=NONE",
        {"target_decode": "NONE", "draft_decode": "NONE"},
    ),
    "enable_prefix_caching": (None, False),
    "async_scheduling": (None, False),
    "seed": ("7", 7),
    "tensor_parallel_size": ("2", 2),
    "tokenizer": ("a/b", "a/b"),
    "revision": ("v1", "v1"),
    "tokenizer_revision": ("v2", "v2"),
    "download_dir": ("there", "there"),
    "model": ("demo/eagle1", "demo/eagle1"),
    "num_speculative_tokens": ("4", 4),
    "method": ("eagle", "eagle"),
    "draft_tensor_parallel_size": ("1", 1),
    "acceptance": ("block", "block"),
    "aux_layers": ("2,4,5", [2, 4, 5]),
    "adaptive": (None, False),
    "top_k": ("1", 1),
    "num_draft_tokens": ("4", 4),
    "draft_confidence_threshold": ("0.2", 0.2),
    "host": ("::1", "::1"),
    "model_names": ("other", ("other",)),
    "api_key": ("secret", "secret"),
    "chat_template": (__file__, Path(__file__).read_text()),
    "use_generation_config": ("auto", True),
    "allowed_origins": ("http://a", ("http://a",)),
    "allowed_hosts": ("a", ("a",)),
    "max_waiting": ("9", 9),
    "record": ("there", Path("there")),
    "ignore_unknown": (None, True),
    "trust_request_chat_template": (None, True),
    "allow_priority": (None, True),
    "shutdown_timeout": ("2.5", 2.5),
    "tool_call_parser": ("none", "none"),
    "reasoning_parser": ("none", "none"),
    "parse_special": (None, False),
}
WITH = {"num_draft_tokens": ("-k", "4")}  # which a chain must equal
CASES = [
    pytest.param(name, config, each, id=f"{name}-{config.__name__}-{each.name}")
    for name in ENGINES
    for config in CONFIGS
    for each in taken_by(name, config)
]


@pytest.fixture
def chosen(monkeypatch) -> list[object]:
    """What a command would run with; it runs nothing."""
    found: list[object] = []
    for name in ENGINES:
        module = import_module(f"specdec.cli.{name}")
        monkeypatch.setattr(module, f"run_{name}", found.append)
    return found


def given_of(each: Described) -> list[str]:
    """The words that give an option the value in GIVEN."""
    value = GIVEN[each.name][0]
    flag = each.flag.split("/")[-1]
    return [flag] if value is None else [f"{flag}={value}"]


def field_of(options: object, config: type, name: str) -> object:
    """The value that a field of a config gets."""
    if config is SpeculativeConfig and hasattr(options, "speculation"):
        return getattr(options.speculation, name)
    own = {EngineConfig: "engine", SpeculativeConfig: "draft_options", ServerOptions: "server"}
    return getattr(options, own[config]).get(name)


@pytest.mark.parametrize("name, config, each", CASES)
def test_a_given_option_is_the_value_of_its_field(run, chosen, name, config, each):
    needs_draft = config is SpeculativeConfig and name != "verify" and each.name != "model"
    draft = ["--draft", "demo"] if needs_draft else []
    words = [*WORDS[name], *draft, *WITH.get(each.name, ()), *given_of(each)]
    assert run(*words) == (0, "", "")
    wanted = GIVEN[each.name][1]
    assert field_of(chosen[0], config, each.name) == wanted
    assert wanted != each.default or each.name in ("top_k",)


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_not_given_is_left_to_the_configs(run, chosen, name):
    assert run(*WORDS[name]) == (0, "", "")
    assert EngineConfig(**chosen[0].engine) == EngineConfig()
    assert getattr(chosen[0], "speculation", None) is None
    if name in ("serve", "batch"):
        server = {"model_names": ("m",)}
        assert ServerOptions(**server, **chosen[0].server) == ServerOptions(**server)


@pytest.mark.parametrize("name", ENGINES)
def test_a_command_has_every_option_of_its_configs(name):
    command = get_command(app).commands[name]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    taken = [each for config in CONFIGS for each in taken_by(name, config)]
    assert {flag for each in taken for flag in each.flag.split("/")} <= flags
    helps = {param.name: param.help for param in command.params}
    assert {parameter_name(each): each.help for each in taken}.items() <= helps.items()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_field_without_an_option_says_why(config):
    assert [each.name for each in fields(config)] == [each.name for each in described(config)]
    for each in described(config):
        assert bool(each.commands) != bool(each.python_only), each.name
        assert set(each.commands) <= set(ENGINES)
        assert each.help
        assert each.commands == () or each.name in GIVEN


@pytest.mark.parametrize(
    "args, words",
    [
        ("serve demo --cuda-graph-modes target_decode", "give NAME=VALUE, with commas between"),
        ("serve demo --cuda-graph-modes x=NONE", "cuda-graph-modes does not take x"),
        ("serve demo --max-waiting -1", "--max-waiting -1: give an integer from 0 to"),
        ("serve demo --generation-config no", "--generation-config no: allowed are auto, none"),
        ("serve demo --revision=", "--revision '': give a string"),
        ("chat demo --draft demo --draft-revision=", "--draft-revision '': give a string"),
        ("chat demo --draft demo --draft-top-k 99", "--draft-top-k 99: give an integer from 1"),
        (
            "chat demo --draft demo --draft-confidence-threshold 1",
            ": --draft-confidence-threshold 1",
        ),
        ("chat demo --draft demo --num-draft-tokens 3", ": --num-draft-tokens 3 without a"),
        ("chat demo --draft demo --method medusa", "--method 'medusa': drafts come from EAGLE"),
        ("chat demo --aux-layers 2,4", "--aux-layers [2, 4] without a draft: give --draft too"),
        ("chat demo --fixed-drafts", "--fixed-drafts without a draft: give --draft too"),
        ("verify demo demo --aux-layers x", "--aux-layers x: give integers with commas between"),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_the_command_runs(run, chosen, args, words):
    code, out, err = run(*args.split())
    assert (code, out) == (2, "")
    assert err.startswith("specdec: error: ")
    assert words in err
    assert chosen == []


def test_bench_passes_on_what_it_is_given(run, monkeypatch):
    found = []
    monkeypatch.setattr(cli_bench, "run_bench", found.append)
    words = "bench demo --suite trees -k 2,3 --trees 8x6x4 --thresholds 0.2 --batch 4 --json j"
    assert run(*words.split()) == (0, "", "")
    [given] = found
    assert (given.command, given.eagle, given.json) == (f"specdec {words}", "demo", Path("j"))
    chosen = {"ks": [2, 3], "thresholds": [0.2], "batches": [4]}
    tree = TreeShape(num_levels=6, top_k=4, num_nodes=7)
    assert given.measured == BenchOptions(**chosen, trees=[tree])
