"""The list of products is what forwards ask for, and what the shipped table holds."""

import pytest

from scripts.tuned_models import KNOWN_MODELS, known_products
from specdec import LLM, SamplingParams, SpeculativeConfig
from specdec.kernels import best_token, gate_up, linear
from specdec.kernels.tables import shipped_table
from specdec.kernels.tile_shapes import FP8, Product
from specdec.models.products import products_of
from tests.block_pair import SELECTOR, write_bigrams
from weights.demo import demo_directory
from weights.files.reader import Reader
from weights.report import Log
from weights.target import resolve_target


@pytest.fixture
def asked(monkeypatch) -> set[Product]:
    """The products that passes ask for while the test runs; the twins hear of them."""
    heard: set[Product] = set()
    running: list[str] = []

    def listen(module: object, name: str, kind: str) -> None:
        twin = getattr(module, name)

        def record(x, weight, *rest):
            if not running:  # a twin may call another one
                heard.add(Product(kind, *weight.shape, "float32"))
            running.append(kind)
            result = twin(x, weight, *rest)
            running.pop()
            return result

        monkeypatch.setattr(module, name, record)

    listen(linear, "linear_ref", "whole")
    listen(linear, "split_linear_ref", "split")
    listen(gate_up, "gate_up_ref", "gate")
    listen(best_token, "best_token_ref", "whole")
    return heard


BLOCKS = {"dflash2": ("speculators", SELECTOR), "dspark": ("deepspec-dspark", {})}


@pytest.mark.parametrize(
    "draft",
    [
        *(None, "demo/eagle3", "demo/eagle1"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in BLOCKS),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_list_is_what_forwards_ask_for(asked, tmp_path, draft, temperature):
    if draft in BLOCKS:
        format, changes = BLOCKS[draft]
        draft = write_bigrams(tmp_path, format, **changes)
    speculation = None if draft is None else SpeculativeConfig(draft, num_speculative_tokens=3)
    llm = LLM("demo", speculative_config=speculation, device="cpu", max_model_len=64)
    llm.generate(["def f("], SamplingParams(temperature=temperature, max_tokens=8, seed=1))

    target = resolve_target(Reader(demo_directory("target")), Log())
    loaded = llm.engine.runner.draft
    eagle = None if loaded is None else loaded.model.config
    assert asked == set(products_of(target, eagle, "float32"))


def test_the_list_of_an_8b_pair_is_the_table_that_was_measured_for_it():
    wanted = {
        Product("split", 6144, 4096),
        Product("split", 4096, 4096),
        Product("gate", 28672, 4096),
        Product("split", 4096, 14336),
        Product("whole", 128256, 4096),
        Product("split", 6144, 8192),
        Product("whole", 4096, 12288),
        Product("whole", 32000, 4096),
    }
    assert set(known_products("llama-3.1-8b")) == wanted
    assert wanted <= set(shipped_table()["NVIDIA H200"])


def test_a_known_model_in_fp8_has_products_of_both_dtypes():
    plain, found = known_products("llama-3.1-8b"), known_products("llama-3.1-8b-fp8")
    of_layers = {Product(kind, N, K, FP8) for kind, N, K, _ in plain[:4]}
    assert set(found) - set(plain) == of_layers
    assert {each.dtype for each in found} == {"bfloat16", FP8}


def test_all_known_models_together_have_few_products():
    found = {product for name in KNOWN_MODELS for product in known_products(name)}
    assert len(found) == 59
    with pytest.raises(ValueError, match=r"model 'gpt-2': known are llama-3.2-1b"):
        known_products("gpt-2")
