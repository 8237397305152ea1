"""Ways in which an engine may run that change no token, with a draft few of whose tokens hold."""

from dataclasses import dataclass, field

import torch

from graphs.modes import CUDAGraphMode
from graphs.tape.backend import TapeBackend
from specdec import SamplingParams
from specdec.config import GraphConfig
from specdec.runner import Runner
from specdec.sizes import BLOCK_SIZE, EngineSizes, TreeShape
from specdec.start.load import assemble
from tests.specdec.models.written import SilentTokenizer
from tests.specdec.tiny_pair import random_draft
from tests.weights.tiny import eagle3_config
from weights import LoadedTarget

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


def texts_of(target: LoadedTarget, way: Way) -> list[list[int]]:
    """Write the tokens after each prompt, in the order of PROMPTS."""
    eagle = random_draft(eagle3_config(target, head_dim=target.config.heads.head_dim))

    sizes = EngineSizes(
        max_model_len=192,
        max_num_seqs=way.num_seqs,
        max_num_batched_tokens=way.chunk,
        num_kv_blocks=3 * len(PROMPTS),
        num_speculative_tokens=way.K,
        tree=way.tree,
    )
    graphs = {} if way.graphs is None else {"backend": TapeBackend(), "graph_config": way.graphs}
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
