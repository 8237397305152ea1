"""What trains the DSpark head computes what the naive draft computes, and learns."""

import pytest
import torch

from scripts.dspark_head.accepted import num_equal
from scripts.dspark_head.head import BLOCK, SIZES, TAPS, DSpark
from scripts.dspark_head.make import save_head
from scripts.dspark_head.train import step
from scripts.experts_pair.publish import load_target
from tests import naive_block
from tests.block_pair import demo_target
from tests.reference import Reference
from tests.test_experts_pair import PROMPT, perturb
from weights import load_eagle
from weights.demo import demo_directory, demo_prompts

K = 6
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def trainer():
    """The target, and a head whose weights are large enough for each to show."""
    torch.manual_seed(0)
    target = load_target(demo_directory("target"), SIZES)
    head = DSpark(SIZES, target.embed_tokens.weight, target.norm.weight)
    perturb(head)
    return target, head


@pytest.fixture(scope="module")
def naive(trainer, tmp_path_factory):
    """What the naive draft reads of the written head, and of the target."""
    directory = tmp_path_factory.mktemp("head")
    save_head(trainer[1], directory)
    reference = Reference(demo_directory("target"))
    cfg, weights = naive_block.read_draft(directory, SIZES.L)
    table = reference.weights["embed_tokens.weight"]
    return reference, cfg, weights | {"embed_tokens.weight": table, "lm_head.weight": table}


def propose(naive, tokens):
    reference, cfg, weights = naive
    outputs = reference.forward(tokens[:-1])
    features_TE = naive_block.target_features(cfg, outputs.boundaries, outputs.hidden_TD)
    return naive_block.propose(cfg, weights, tokens, features_TE, K)


@torch.no_grad()
def test_blocks_at_all_places_have_the_logits_of_the_naive_draft(trainer, naive):
    target, head = trainer
    boundaries, *_ = target(torch.tensor([PROMPT]))
    features_BSE = torch.cat([boundaries[i] for i in TAPS], -1)
    anchors_A = torch.tensor([1, 9, 30])
    tokens_A = torch.tensor(PROMPT)[anchors_A]
    hidden_ARD = head.rows(features_BSE, tokens_A[None], anchors_A, K)[0]
    for hidden_RD, n in zip(hidden_ARD, anchors_A.tolist(), strict=True):
        block = propose(naive, PROMPT[: n + 1])
        before_R = torch.tensor([PROMPT[n], *block.tokens[:-1]])
        torch.testing.assert_close(head.logits(hidden_RD, before_R), block.logits_KW, **CLOSE)
        found = head.confidence(hidden_RD, before_R).sigmoid()
        torch.testing.assert_close(found, torch.tensor(block.confidences), **CLOSE)


@torch.no_grad()
def test_drafts_count_until_the_first_that_is_not_the_text_s(trainer, naive):
    drafts = propose(naive, PROMPT).tokens
    start = len(PROMPT) - 1
    for wrong in range(K + 1):
        text = [t if i != wrong else t - 1 for i, t in enumerate(drafts)]
        assert num_equal(*trainer, torch.tensor(PROMPT + text), start, K)[0] == wrong


def test_the_written_head_is_read_and_has_less_than_5_megabytes(trainer, tmp_path):
    save_head(trainer[1], tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 5_000_000
    config = load_eagle(tmp_path, demo_target(), progress=False).config
    assert (config.block_size, config.markov, config.confidence) == (BLOCK, "vanilla", "markov")


@pytest.mark.slow
def test_a_head_learns_a_text(trainer):
    target, _ = trainer
    torch.manual_seed(0)
    head = DSpark(SIZES, target.embed_tokens.weight, target.norm.weight)
    found = demo_prompts()
    tokens_BS = torch.tensor([(found["prompts"][0] + found["greedy_float32"][0])[:200]])
    optimizer = torch.optim.AdamW(head.parameters(), 2e-3)
    rates = []
    for _ in range(60):
        loss, is_same = step(target, head, tokens_BS, torch.zeros(1), (16, BLOCK))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(float(is_same.float().mean()))
    assert max(rates[:3]) < 0.1
    assert min(rates[-5:]) > 0.3
