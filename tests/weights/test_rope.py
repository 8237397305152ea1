"""Rope in both spellings; contradictions and unsupported kinds are refused by name."""

from pathlib import Path

import pytest

from weights import RopeConfig
from weights.errors import Problems
from weights.fields import Fields
from weights.rope import read_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BUILT = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192)


def read(**keys):
    problems = Problems(Path("dir"))
    return read_rope(Fields(keys, "config.json", problems)), problems.lines


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000}},
        {"rope_theta": 500000, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}},
        {
            "rope_theta": 5e5,
            "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
            "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5},
        },
        {
            "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
            "rope_parameters": {"rope_theta": 5e5},
        },
        {
            "rope_scaling": LLAMA3,
            "rope_parameters": {"type": "llama3", "rope_theta": 5e5},
        },
    ],
)
def test_all_spellings_of_one_rope_are_equal(keys):
    assert read(**keys) == (BUILT, [])


def test_the_default_base_is_10000():
    assert read() == (RopeConfig(theta=10000.0), [])
    assert read(rope_scaling=None, rope_theta=1e6) == (RopeConfig(theta=1e6), [])


def test_yarn_falls_back_to_the_configs_own_length():
    rope, lines = read(
        max_position_embeddings=4096, rope_scaling={"type": "yarn", "factor": 4, "mscale": 0.7}
    )
    assert rope == RopeConfig(
        kind="yarn", factor=4.0, original_max_position_embeddings=4096, mscale=0.7
    )
    assert lines == []


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 2048}])
def test_the_original_length_may_stand_beside_the_rope(kind, inner):
    rope, lines = read(
        max_position_embeddings=4096,
        original_max_position_embeddings=2048,
        rope_scaling={"rope_type": kind, "factor": 2.0, **inner},
    )
    assert (rope.kind, rope.original_max_position_embeddings, lines) == (kind, 2048, [])


def test_the_original_length_says_nothing_of_other_ropes():
    scaling = {"rope_type": "linear", "factor": 2.0}
    rope, lines = read(original_max_position_embeddings=2048, rope_scaling=scaling)
    assert (rope, lines) == (RopeConfig(kind="linear", factor=2.0), [])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk"])
def test_an_unknown_kind_is_refused_by_name(kind):
    _, lines = read(rope_scaling={"type": kind, "factor": 2.0})
    assert len(lines) == 1
    assert f"rope type {kind!r} is not supported" in lines[0]


@pytest.mark.parametrize(
    "keys, words",
    [
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "keep one",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "factor is 2.0 in",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "yarn", "factor": 2.0},
            },
            "rope_type is 'linear' in rope_parameters and 'yarn' in rope_scaling",
        ),
        (
            {
                "rope_parameters": {"type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
                "max_position_embeddings": 64,
            },
            "rope_type is 'linear' in rope_parameters and 'yarn' in rope_scaling",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"factor": 2.0},
            },
            "rope_parameters and rope_scaling: unknown key factor for rope type 'default'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "missing original_max_position_embeddings",
        ),
        (
            {
                "original_max_position_embeddings": 4096,
                "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
            },
            "original_max_position_embeddings is 4096, and 8192 in rope_scaling: keep one",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: missing factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
            "factor is '8', a number is needed",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8, "short_factor": [1]}},
            "unknown key short_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": "linear"}, "an object is needed"),
        ({"rope_theta": "1e6"}, "a number is needed"),
    ],
)
def test_a_contradictory_or_unknown_rope_is_refused(keys, words):
    _, lines = read(**keys)
    assert len(lines) == 1
    assert words in lines[0]
