"""A tiny mixture of experts: drafts, neighbours, chunks, caches and graphs change no token.

Its weights are random and made by transformers, and so is the draft, few of whose tokens hold.
"""

from functools import partial

import pytest
import torch

from specdec.kernels.experts.tiles import class_of
from specdec.models import experts
from specdec.models.attention import cache_slots
from specdec.runner import Runner
from specdec.sizes import EngineSizes
from specdec.start.compile_ahead import forwards
from tests.e2e.ways import CPU, PROMPTS, WAYS, Way, texts_of
from tests.weights.gpt_oss import write_both_forms
from tests.weights.published import save
from weights import load_target


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
    return partial(texts_of, target)


@pytest.fixture(scope="module")
def alone(texts):
    """What each request gets without neighbours, drafts and graphs, in one chunk."""
    return texts(Way(num_seqs=1))


GRAPHS = [name for name, way in WAYS.items() if way.graphs is not None]  # with poison, below


@pytest.mark.parametrize("name", [name for name in WAYS if name not in GRAPHS])
def test_no_token_depends_on_the_way_of_the_engine(texts, alone, name):
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert texts(WAYS[name]) == alone


@pytest.mark.parametrize("name", GRAPHS)
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
