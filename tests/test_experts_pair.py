"""What trains the pair with experts computes what engines and transformers compute."""

import numpy as np
import pytest
import torch
import transformers

from scripts.experts_pair import corpus
from scripts.experts_pair.attention import Sizes
from scripts.experts_pair.eagle3 import TAPS, Eagle3
from scripts.experts_pair.generate import generate
from scripts.experts_pair.publish import load_target, save_head, save_target
from scripts.experts_pair.target import Target
from specdec import LLM, SamplingParams
from tests import naive_eagle
from tests.reference import Reference

PROMPT = [0, *((37 * i + 11) % 4096 for i in range(40))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A directory with both files, and both modules with the rounded weights of these files."""
    directory, sizes = tmp_path_factory.mktemp("pair"), Sizes()
    torch.manual_seed(0)
    target = Target(sizes)
    perturb(target)
    save_target(target, directory / "target")
    target = load_target(directory / "target")
    ids_W = torch.randperm(sizes.V)[: sizes.W].sort().values
    head = Eagle3(sizes, ids_W, target.embed_tokens.weight, target.norm.weight)
    perturb(head)
    save_head(head, sizes, directory / "eagle3")
    return directory, target, head


@torch.no_grad()
def perturb(module):
    """Rounds to bfloat16 what is large enough for each weight to show."""
    for weight in module.parameters():
        weight += 0.1 * torch.randn_like(weight)
        weight.copy_(weight.bfloat16())


def test_both_files_have_less_than_8_megabytes(pair):
    directory, *_ = pair
    sizes = [file.stat().st_size for file in directory.rglob("*.safetensors")]
    assert len(sizes) == 2
    assert sum(sizes) < 8_000_000


@torch.no_grad()
def test_the_target_has_the_logits_of_transformers_and_of_the_reference(pair):
    directory, target, _ = pair
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "target", dtype=torch.float32
    )
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    expected_SV = model(torch.tensor([PROMPT])).logits[0]
    boundaries, *_ = target(torch.tensor([PROMPT]))
    found_SV = target.logits(boundaries[-1])[0]
    reference_SV = Reference(directory / "target").forward(PROMPT).logits_TV
    assert expected_SV.std() > 0.5
    torch.testing.assert_close(found_SV, expected_SV, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(reference_SV, expected_SV, rtol=1e-4, atol=2e-4)


def test_what_the_target_writes_greedily_is_the_reference_s_text(pair):
    directory, target, _ = pair
    prompts = torch.tensor([PROMPT, PROMPT])
    written = generate(target, prompts, len(PROMPT) + 12, torch.tensor([0.0, 1.0]))
    expected = Reference(directory / "target").greedy(PROMPT, 12)
    assert written[0].tolist() == PROMPT + expected
    assert written[1, len(PROMPT) :].tolist() != expected


@torch.no_grad()
def test_each_unrolled_step_has_the_logits_of_the_naive_draft(pair):
    directory, target, head = pair
    reference = Reference(directory / "target")
    outputs = reference.forward(PROMPT)
    cfg, weights = naive_eagle.read_draft(directory / "eagle3", TAPS)
    weights = naive_eagle.borrow(cfg, weights, reference.weights)
    features_TE = naive_eagle.target_features(cfg, outputs.boundaries, outputs.hidden_TD)

    embed_BSD = target.embed_tokens(torch.tensor([PROMPT]))
    embeds = [embed_BSD.roll(-1 - step, 1) for step in range(5)]
    unrolled = torch.stack(head(features_TE[None], embeds))[:, 0]

    for row in (0, 9, 30):
        tokens, teacher = PROMPT[: row + 2], PROMPT[row + 2 : row + 6]
        expected_KW = naive_eagle.draft_logits(
            cfg, weights, tokens, features_TE[: row + 1], 5, teacher
        )
        torch.testing.assert_close(unrolled[:, row], expected_KW, rtol=1e-3, atol=1e-3)


def test_drafts_change_no_token_and_rounds_are_those_of_the_naive_draft(pair):
    directory, *_ = pair
    target, head = directory / "target", directory / "eagle3"
    reference = Reference(target)
    cfg, weights = naive_eagle.read_draft(head, TAPS)
    weights = naive_eagle.borrow(cfg, weights, reference.weights)
    naive = naive_eagle.generate(reference, cfg, weights, PROMPT, 16, 3)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for draft in (None, {"model": str(head), "num_speculative_tokens": 3}):
        llm = LLM(str(target), draft, device="cpu", dtype="float32", max_num_seqs=2)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        assert output.outputs[0].token_ids == naive.tokens
    assert output.stats.num_accepted == naive.num_accepted


def test_the_corpus_has_open_packages_and_no_file_of_a_prompt(tmp_path):
    files = corpus.python_files()
    assert any("/torch/" in file for file in files)
    assert not any("site-packages/nvidia" in file for file in files)
    text, prompt = "x = 1\n" * 50, corpus._prompts()[0]
    for name, content in (("kept", text), ("prompt", prompt + text), ("short", "x")):
        (tmp_path / f"{name}.py").write_text(content)
    names = [str(tmp_path / f"{name}.py") for name in ("kept", "prompt", "short", "none")]
    [(_, size, tokens)] = corpus._tokenize(names)
    assert size == len(text)
    assert tokens.dtype == np.uint16
    assert (tokens[0], tokens[-1]) == (corpus.BOS, corpus.EOS)
