"""The bundled target with a window of 24 keys: no token depends on drafts and ranks."""

import json
import shutil

import pytest

from specdec import LLM
from tests.reference import Reference
from weights.demo import demo_directory

SIZES = {"max_num_seqs": 3, "max_model_len": 256, "device": "cpu"}
WINDOW = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Llama is a Mistral without a window."""
    target = shutil.copytree(demo_directory("target"), tmp_path_factory.mktemp("target") / "it")
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {"sliding_window": WINDOW}
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def expected(directory, prompts):
    reference = Reference(directory)
    return [reference.greedy(prompt, 24) for prompt in prompts[:3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft",
    [
        None,
        {"model": "demo", "num_speculative_tokens": 3},
        {"model": "demo"},
        {"model": "demo/eagle1", "num_speculative_tokens": 4, "top_k": 3, "num_draft_tokens": 9},
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_are_the_references(directory, prompts, expected, greedy, draft, num_ranks):
    llm = LLM(str(directory), draft, **SIZES, tensor_parallel_size=num_ranks)
    outputs = llm.generate(prompts[:3], greedy(24), use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == expected
    if draft is not None:
        assert sum(each.stats.num_accepted_tokens for each in outputs) > 20
    llm.engine.drain()


@pytest.mark.slow
def test_a_window_changes_what_the_target_writes(prompts, expected):
    whole = Reference(demo_directory("target"))
    assert [whole.greedy(prompt, 24) for prompt in prompts[:3]] != expected
