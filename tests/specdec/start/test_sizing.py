"""How long a context may be: what config.json says, times what its rope is stretched by."""

import dataclasses

import pytest

from specdec.config import EngineConfig
from specdec.start.sizing import largest_sizes
from specdec.start.speculation import drafting_of
from tests.weights.tiny import tiny_target
from weights import RopeConfig


def max_model_len(rope, given=None):
    """Of a target with max_position_embeddings=256."""
    target = tiny_target().config
    kind = dataclasses.replace(target.layers[0], rope=rope)
    target = dataclasses.replace(target, layers=(kind,) * target.num_layers)
    drafting = drafting_of(None, has_graphs=False)
    return largest_sizes(EngineConfig(max_model_len=given), drafting, target, None).max_model_len


def yarn(original, factor):
    return RopeConfig(kind="yarn", factor=factor, original_max_position_embeddings=original)


@pytest.mark.parametrize(
    "rope, longest",
    [
        (RopeConfig(), 256),
        (RopeConfig(kind="linear", factor=2.5), 640),
        (RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=128), 256),
        (yarn(256, 4.0), 1024),
        (yarn(200, 4.0), 800),
        pytest.param(yarn(64, 4.0), 256, id="raised already"),
        pytest.param(yarn(16, 4.0), 256, id="raised further"),
    ],
)
def test_a_stretched_rope_lengthens_the_context(rope, longest):
    assert max_model_len(rope) == longest
    assert max_model_len(rope, longest) == longest
    with pytest.raises(ValueError, match=rf"max_model_len={longest + 1} exceeds the target's"):
        max_model_len(rope, longest + 1)


def test_the_limit_says_what_it_is_made_of():
    with pytest.raises(ValueError, match=r"the target's 1024 positions \(yarn rope: 256 \* 4\)$"):
        max_model_len(yarn(256, 4.0), 1025)
