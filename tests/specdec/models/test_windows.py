"""Layers with a window of 24 keys, and with sinks, write the same however an engine runs."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from graphs.tape.backend import TapeBackend
from specdec import SamplingParams
from specdec.config import GraphConfig
from specdec.runner import Runner
from specdec.sizes import EngineSizes, TreeShape
from specdec.start.load import assemble
from tests.reference import Reference
from tests.specdec.models.test_published import LOGITS, difference
from tests.specdec.models.written import SilentTokenizer
from tests.specdec.tiny_pair import random_draft
from tests.weights.published import save
from tests.weights.tiny import eagle3_config
from weights import load_target
from weights.load import LoadedTarget

WINDOW = 24
LENGTHS = 1, 23, 24, 25, 64, 70
PROMPTS = [[(29 * i + 5 * n) % 96 for i in range(n)] for n in LENGTHS]
PROMPTS.append([*PROMPTS[-1][:66], 5, 6])  # begins as another
NUM_TOKENS = 12


@dataclass(frozen=True)
class Way:
    """How an engine runs."""

    K: int = 3
    chunk: int = 16
    num_seqs: int = 3
    tree: TreeShape | None = None
    is_cached: bool = False
    has_graphs: bool = False


WAYS = {
    "drafts": Way(num_seqs=2),
    "one chunk": Way(K=0, chunk=512),
    "trees": Way(tree=TreeShape(num_levels=3, top_k=2, num_nodes=6), chunk=100),
    "cached prefixes": Way(is_cached=True, num_seqs=1),
    "graphs": Way(has_graphs=True, num_seqs=6, chunk=40),
}
SLOW = "one chunk", "graphs"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def mistral(directory):
    """The model of transformers, and what we load of its files."""
    model = save("mistral, windows", directory)
    return model, load_target(directory, progress=False)


@pytest.fixture(scope="module")
def draft(mistral):
    """A draft with a window of its own."""
    _, loaded = mistral
    head_dim = loaded.config.heads.head_dim
    return random_draft(eagle3_config(loaded, head_dim=head_dim, window=20))


def changed(loaded: LoadedTarget, **changes: object) -> LoadedTarget:
    """The target with other values in the kinds of its layers."""
    layers = tuple(dataclasses.replace(kind, **changes) for kind in loaded.config.layers)
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, layers=layers))


def write(loaded: LoadedTarget, eagle, way: Way) -> list[list[int]]:
    sizes = EngineSizes(
        max_model_len=192,
        max_num_seqs=way.num_seqs,
        max_num_batched_tokens=way.chunk,
        num_kv_blocks=3 * len(PROMPTS),
        num_speculative_tokens=way.K,
        tree=way.tree,
    )
    options = {}
    if way.has_graphs:
        graphs = GraphConfig(request_sizes=(3, 6), token_sizes=(16, 64))
        options = {"backend": TapeBackend(), "graph_config": graphs}
    runner = Runner(loaded, eagle if way.K else None, sizes, torch.device("cpu"), **options)
    runner.capture()
    how = {"use_prefix_cache": way.is_cached, "is_async": False}
    engine = assemble(runner, loaded.config, SilentTokenizer(), **how)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = engine.add_requests([(prompt, params) for prompt in PROMPTS])
    while engine.has_unfinished:
        engine.step()
    num_cached = max(request.stats.num_cached_tokens for request in requests)
    assert (num_cached > WINDOW) == way.is_cached
    return [request.token_ids for request in requests]


@pytest.fixture(scope="module")
def alone(mistral):
    """What an engine without drafts writes after one prompt at a time, in chunks of 16."""
    return write(mistral[1], None, Way(K=0, num_seqs=1))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_tokens_are_those_of_transformers(mistral, length):
    prompt = PROMPTS[LENGTHS.index(length)]
    num_tokens = max(WINDOW + 8 - length, 8)  # some of them beyond the window
    assert difference(*mistral, prompt, num_tokens) <= LOGITS


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, None])
def test_another_window_shows_in_the_logits(mistral, window):
    model, loaded = mistral
    assert difference(model, changed(loaded, window=window), PROMPTS[3], 4) > 10 * LOGITS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WAYS]
)
def test_no_token_depends_on_the_way_of_the_engine(mistral, draft, alone, name):
    assert write(mistral[1], draft, WAYS[name]) == alone


@pytest.fixture(scope="module")
def sinks(mistral):
    """Of each layer [H], with a spread of 1.5."""
    generator = torch.Generator().manual_seed(0)
    config = mistral[1].config
    return {
        f"layers.{i}.self_attn.sinks": 1.5 * torch.randn(kind.num_heads, generator=generator)
        for i, kind in enumerate(config.layers)
    }


def with_sinks(loaded: LoadedTarget, sinks: dict) -> LoadedTarget:
    return dataclasses.replace(changed(loaded, has_sinks=True), tensors=loaded.tensors | sinks)


@pytest.mark.parametrize("way", [Way(K=0), pytest.param(Way(), marks=pytest.mark.slow)])
def test_sinks_count_in_the_softmax_of_each_layer(mistral, draft, directory, sinks, alone, way):
    reference = Reference(directory)
    reference.weights |= sinks
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert write(with_sinks(mistral[1], sinks), draft, way) == expected
    assert sum(text != other for text, other in zip(expected, alone, strict=True)) > 3
