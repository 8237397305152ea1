"""A tiny mixture of experts: drafts, neighbours, chunks, caches and graphs change no token.

Its weights are random and made by transformers, and so is the draft, few of whose tokens hold.
"""

from dataclasses import dataclass, field

import pytest
import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import SamplingParams
from specdec.config import GraphConfig
from specdec.kernels.experts.tiles import class_of
from specdec.models import experts
from specdec.models.attention import cache_slots
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, EngineSizes, TreeShape
from specdec.start.compile_ahead import forwards
from specdec.start.load import assemble
from tests.specdec.models.written import SilentTokenizer
from tests.specdec.tiny_pair import random_draft
from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import save
from tests.weights.tiny import eagle3_config
from weights import load_target

CPU = torch.device("cpu")
NUM_TOKENS = 12
PROMPTS = [[(step * i + step) % 96 for i in range(n)] for step, n in ((37, 23), (29, 90), (11, 1))]
PROMPTS.append([*PROMPTS[1][:80], 5, 6, 7])  # begins as another
PARAMS = [
    SamplingParams(temperature=heat, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
    for seed, heat in enumerate((0.0, 0.0, 0.9, 0.0))
]
TREE = TreeShape(num_levels=3, top_k=2, num_nodes=5)


@dataclass(frozen=True)
class Way:
    """How an engine runs. sizes: of graphs, on the tape; None: all is eager."""

    K: int = 0
    chunk: int = 256
    tree: TreeShape | None = None
    is_cached: bool = False
    graphs: GraphConfig | None = None
    num_seqs: int = 4
    order: list[int] = field(default_factory=lambda: [0, 1, 2, 3])


PADDED = GraphConfig(request_sizes=(3, 6), token_sizes=(16, 64))
WAYS = {
    "drafts": Way(K=3),
    "trees": Way(K=3, tree=TREE),
    "chunks": Way(chunk=7),
    "drafts and chunks, one after another": Way(K=3, chunk=40, num_seqs=1),
    "another order, two at a time": Way(K=3, chunk=50, num_seqs=2, order=[3, 2, 1, 0]),
    "cached prefixes": Way(K=3, is_cached=True, num_seqs=1),
    "graphs": Way(graphs=PADDED, chunk=64, num_seqs=6),
    "graphs and drafts": Way(K=3, graphs=PADDED, chunk=40, num_seqs=6),
}


@pytest.fixture(
    scope="module",
    params=["qwen3_moe, a dense layer", pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def target(request, tmp_path_factory):
    """gpt_oss: in MXFP4, with windows and sinks."""
    directory = tmp_path_factory.mktemp("target")
    save(request.param, directory / "plain")
    if request.param != "gpt_oss":
        return load_target(directory / "plain", progress=False)
    write_both_forms(directory / "plain", directory / "packed", directory / "other")
    return load_target(directory / "packed", progress=False)


@pytest.fixture(scope="module")
def texts(target):
    """texts(way): the tokens after each prompt, in the order of PROMPTS."""
    eagle = random_draft(eagle3_config(target, head_dim=target.config.heads.head_dim))

    def write(way):
        sizes = EngineSizes(
            max_model_len=192,
            max_num_seqs=way.num_seqs,
            max_num_batched_tokens=way.chunk,
            num_kv_blocks=3 * len(PROMPTS),
            num_speculative_tokens=way.K,
            tree=way.tree,
        )
        graphs = (
            {} if way.graphs is None else {"backend": TapeBackend(), "graph_config": way.graphs}
        )
        runner = Runner(target, eagle if way.K else None, sizes, CPU, **graphs)
        runner.capture()
        options = {"use_prefix_cache": way.is_cached, "is_async": False}
        engine = assemble(runner, target.config, SilentTokenizer(), **options)
        asked = [(PROMPTS[i], PARAMS[i]) for i in way.order]
        requests = engine.add_requests(asked)
        while engine.has_unfinished:
            engine.step()
        if way.is_cached:
            assert max(request.stats.num_cached_tokens for request in requests) >= BLOCK_SIZE
        counters = runner.graphs.counters().values()
        modes = {mode for each in counters for mode, count in each.dispatches.items() if count}
        of_drafts = {CUDAGraphMode.PIECEWISE} if way.K else set()  # of their prompts
        captured = set() if way.graphs is None else {CUDAGraphMode.FULL} | of_drafts
        assert modes - {CUDAGraphMode.NONE} == captured
        drafted = sum(request.stats.num_drafted_tokens for request in requests)
        assert (drafted > NUM_TOKENS) == (way.K > 0)
        found = dict(zip(way.order, (request.token_ids for request in requests), strict=True))
        return [found[i] for i in sorted(found)]

    return write


@pytest.fixture(scope="module")
def alone(texts):
    """What each request gets without neighbours, drafts and graphs, in one chunk."""
    return texts(Way(num_seqs=1))


@pytest.mark.parametrize("name", WAYS)
def test_no_token_depends_on_the_way_of_the_engine(texts, alone, name):
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert texts(WAYS[name]) == alone


@pytest.mark.parametrize("name", ["graphs", "graphs and drafts"])
def test_rows_of_padding_choose_nobody_and_add_nothing(target, texts, alone, name, monkeypatch):
    """Their inputs and what experts would leave for them are NaN."""
    real = experts.experts_mlp
    E = target.config.experts.num
    num_padding = torch.zeros((), dtype=torch.int64)
    num_wrong = torch.zeros((), dtype=torch.int64)

    def poisoned(x_TD, ids_TS, weights_TS, *weights):
        T = len(x_TD)
        is_padding_T = (ids_TS == E).all(dim=1)
        if len(cache_slots()) == T:  # all rows, not only those that are finished
            num_wrong.add_((is_padding_T != (cache_slots() < 0)).sum())
        num_padding.add_(is_padding_T.sum())
        x_TD = x_TD.masked_fill(is_padding_T[:, None], torch.nan)
        sums = real(x_TD, ids_TS, weights_TS, *weights)
        parts = sums.parts_STN.masked_fill(is_padding_T[None, :, None], torch.nan)
        return sums._replace(parts_STN=parts)

    monkeypatch.setattr(experts, "experts_mlp", poisoned)
    assert texts(WAYS[name]) == alone
    assert num_padding > 0
    assert num_wrong == 0


def test_serving_asks_of_experts_what_was_asked_ahead(target, texts, monkeypatch):
    """Classes of rows, and routers that know all rows of a pass or some of them."""
    found = set()
    real_mlp, real_choose = experts.experts_mlp, experts.choose_experts
    monkeypatch.setattr(
        experts,
        "experts_mlp",
        lambda x, *rest: (found.add(class_of(len(x))), real_mlp(x, *rest))[1],
    )
    monkeypatch.setattr(
        experts,
        "choose_experts",
        lambda *args: (found.add(("router", args[3] is None)), real_choose(*args))[1],
    )
    texts(Way(chunk=300, order=[1, 3, 1, 3]))
    serving = found.copy()
    found.clear()
    sizes = EngineSizes(
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=300,
        num_kv_blocks=4,
        num_speculative_tokens=0,
    )
    runner = Runner(target, None, sizes, CPU)
    with torch.inference_mode(), runner.target.model.shortened():
        for step in forwards(runner):
            runner.acts.run(step)
    assert serving <= found, serving - found
    assert {("router", True), ("router", False)} <= serving
