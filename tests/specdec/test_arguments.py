"""Any value of an argument either runs or raises a ValueError that names the argument."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams, SpeculativeConfig
from specdec.arguments import as_list, refuse_unknown
from specdec.config import EngineConfig

ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**70,
        -(2**70),
        10**400,
        0.5,
        -0.5,
        2.0,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(
        "",
        "x",
        "\udce9",
        "0",
        b"",
        b"\x01",
        bytearray(b"\x01"),
        memoryview(b"\x01"),
        1j,
        object(),
        int,
        print,
    ),
    *(
        (),
        [],
        [1],
        ["a"],
        [b"a"],
        [None],
        [[1]],
        [True],
        [-1],
        [2**70],
        [0.5],
        [float("nan")],
        (1, "a"),
        iter([1]),
    ),
    *(
        {},
        {1: 1.0},
        {"a": 1},
        {None: None},
        {1: float("nan")},
        {"draft_prefill": 1},
        {"target_decode": [1]},
    ),
    *(set(), {1}, frozenset("a"), range(0), range(3)),
    *(
        np.int64(1),
        np.int64(-1),
        np.float32(0.5),
        np.float64("nan"),
        np.bool_(True),
        np.str_("x"),
        np.array(1),
    ),
    *(np.array([1, 2]), np.array(["a", "b"]), np.array([])),
    *(
        torch.tensor(1),
        torch.tensor(0.5),
        torch.tensor([1, 2]),
        torch.tensor([0.5]),
        torch.tensor([]),
        torch.float16,
    ),
]


def refusals(build, name):
    """How many odd values are refused. Any error but a ValueError that names the argument fails."""
    texts = [text for value in ODD if (text := refusal(build, {name: value})) is not None]
    assert [text for text in texts if name not in text] == []
    return len(texts)


def refusal(build, values):
    """The text of the ValueError, if there is one."""
    try:
        build(**values)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_every_option_of_an_engine_takes_a_value_or_refuses_it_by_name(name):
    assert refusals(EngineConfig, name) > len(ODD) / 2


@pytest.mark.parametrize("name", [field.name for field in fields(SpeculativeConfig)])
def test_every_option_of_a_draft_takes_a_value_or_refuses_it_by_name(name):
    assert (
        refusals(lambda **values: SpeculativeConfig(**{"model": "demo"} | values), name)
        > len(ODD) / 2
    )


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_parameter_of_a_request_takes_a_value_or_refuses_it_by_name(name):
    assert refusals(SamplingParams, name) > len(ODD) / 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"enforce_eager": 1}, "enforce_eager=1: allowed are False, True"),
        ({"async_scheduling": 0}, "async_scheduling=0: allowed are None, False, True"),
        ({"cuda_graph_sizes": b"\x01"}, "cuda_graph_sizes=b'.x01': give a list of integers"),
        ({"cuda_graph_modes": True}, "cuda_graph_modes=True: give {family: mode}"),
        ({"cuda_graph_modes": {1: "FULL"}}, "cuda_graph_modes does not take 1"),
        ({"cuda_graph_modes": []}, r"cuda_graph_modes=\[\]: give {family: mode}"),
        ({"device": 0}, "device=0: give auto, cpu"),
        ({"device": "cpu:1"}, "device='cpu:1': give auto, cpu"),
        ({"dtype": torch.float16}, "dtype=torch.float16: allowed are auto, float32"),
        ({"dtype": np.array(["auto", "auto"])}, "dtype=array.*: allowed are auto"),
        (
            {"num_kv_blocks": 1 << 30},
            "num_kv_blocks=1073741824 take .* GiB, and there are .* GiB: give fewer",
        ),
    ],
)
def test_an_engine_refuses_odd_values_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        LLM("demo", **{"device": "cpu"} | options)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_k": torch.tensor([1, 2])}, "top_k=tensor"),
        ({"top_k": -1.0}, "top_k=-1.0"),
        ({"stop": b""}, "stop=b'': give a string or a list"),
        ({"stop_token_ids": b"\x05"}, "stop_token_ids=b'.x05': give a list of token ids"),
        ({"allowed_token_ids": b"\x05"}, "allowed_token_ids=b'.x05': give a list of token ids"),
        ({"bad_words": b""}, "bad_words=b'': give a list"),
        ({"n": 2**70}, "n=1180591620717411303424: give an integer from 1 to 1024"),
    ],
)
def test_a_request_refuses_odd_values_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "value, words",
    [
        ({1: 1.0}, "SpeculativeConfig does not take 1 "),
        ({"model": 5}, "model=5: give a directory, a hub id"),
        ({"model": "demo", "aux_layers": [True]}, r"aux_layers=\[True\]: give a list"),
        ({"model": "demo", "aux_layers": b"\x01"}, "aux_layers=b'.x01': give a list"),
        (5, "speculative_config=5: give a SpeculativeConfig or a dict"),
        (torch.tensor([1]), "speculative_config=tensor.*: give a SpeculativeConfig"),
    ],
)
def test_a_draft_refuses_odd_values_by_name(value, words):
    with pytest.raises(ValueError, match=words):
        LLM("demo", value)


def test_names_of_any_type_are_refused_together():
    with pytest.raises(
        ValueError,
        match=r"it does not take 1, None, modle; did you mean model\? \(allowed: model\)",
    ):
        refuse_unknown("it", {"modle": 0, 1: 0, None: 0}, ["model"])


@pytest.mark.parametrize("value", ["ab", b"ab", {1: 2}, {1}, 5, None, torch.tensor(1), np.array(1)])
def test_values_without_order_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"things=.*: give a list of things"):
        as_list("things", value, "a list of things")


def test_values_with_an_order_are_lists():
    assert (
        as_list("things", (1, 2), "")
        == as_list("things", range(1, 3), "")
        == as_list("things", iter([1, 2]), "")
    )
