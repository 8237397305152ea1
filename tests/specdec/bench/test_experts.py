"""What benchmarks know of a target with experts, on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from specdec.bench import products as suite
from specdec.bench.bench import Bench
from specdec.bench.exactness import Job, backend_of
from specdec.bench.expert_yardstick import grouped_experts
from specdec.bench.options import BenchOptions
from specdec.bench.pair import bytes_of
from specdec.kernels.backend import using
from specdec.kernels.experts.mlp import experts_mlp
from specdec.models import experts
from specdec.models.experts import Experts
from tests.weights.published import save
from weights import ExpertsConfig, load_target

E, k, D, I = 6, 2, 16, 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    save("qwen3_moe, a dense layer", directory)
    return SimpleNamespace(target=load_target(directory, progress=False), eagle=None, device=CPU)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    config = ExpertsConfig(num=E, per_token=k, width=I, renormalise=True)
    layer = Experts(D, config)
    for weight in layer.parameters():
        weight.data.normal_(std=0.3)
    return layer


@pytest.mark.parametrize("T", [1, 5, 40])
def test_grouped_products_add_up_to_ours(layer, T):
    x, ids = torch.randn(T, D), torch.rand(T, E).topk(k).indices.int()
    weights = torch.rand(T, k)
    is_padding = torch.arange(T) % 3 == 1
    ids[is_padding], weights[is_padding] = E, 0.0
    of_experts = layer.experts.weights
    ours = experts_mlp(x, ids, weights, *of_experts).finish(x.dtype)
    theirs = grouped_experts(x, ids, weights, *(each.data for each in of_experts))
    torch.testing.assert_close(theirs[~is_padding], ours[~is_padding])


def test_exchanged_layers_take_grouped_products(layer, monkeypatch):
    monkeypatch.setattr(experts, "cache_slots", lambda: torch.arange(9))
    x = torch.randn(9, D)
    shipped = layer(x)
    assert shipped.weights_TS is not None
    with using(backend_of(("layers",), Job(batch=1, rows=1, context=1), CPU)):
        exchanged = layer(x)
    assert exchanged.weights_TS is None, "our own ran"
    torch.testing.assert_close(exchanged.finish(x.dtype), shipped.finish(x.dtype))


def test_a_pass_streams_the_experts_of_a_row(pair):
    config = pair.target.config
    held = sum(each.nbytes for name, each in pair.target.tensors.items() if "embed" not in name)
    stacked = sum(each.nbytes for each in pair.target.tensors.values() if each.ndim == 3)
    assert stacked == 5 * 12 * 3 * 24 * config.hidden_size * 4
    assert bytes_of(pair).of_target(1) == held - stacked * 9 // 12


def test_products_time_the_router_and_name_the_suite_of_experts(pair, monkeypatch):
    monkeypatch.setattr(suite, "ROWS", (2,))
    bench = Bench(pair, 1e12, BenchOptions())
    rows = list(suite.products(bench))
    assert {"target gate", "target qkv_proj", "target lm_head"} <= {row["weight"] for row in rows}
    [router] = [row for row in rows if row["weight"] == "target gate"]
    assert (router["N"], router["K"]) == (12, pair.target.config.hidden_size)
    assert bench.skipped == ["products: experts, which the suite experts times"]
