"""Perfect drafts are all accepted, garbage drafts are not, and neither changes a token."""

import json
import shutil

import pytest
import torch

from specdec import LLM
from weights.demo import demo_directory

K = 4


class ScriptedDraft:
    """Proposes, for a request at position n, the tokens script[row][n + 1 ...]."""

    def __init__(self, runner, scripts, num_drafts=K):
        self.runner = runner
        self.scripts = scripts
        self.num_drafts = num_drafts

    def extend(self, step):
        pass

    def propose(self, step):
        state = self.runner.state
        for row in self.runner.buffers.sample_mapping[: step.num_reqs].tolist():
            here = int(state.num_computed_tokens[row]) + 1
            tokens = (self.scripts[row] + [0] * 2 * self.num_drafts)[here : here + self.num_drafts]
            state.draft_tokens[row] = torch.tensor(tokens)
            state.num_nodes[row] = state.num_draft_tokens[row]


def run_scripted(llm, prompts, params, continuations):
    runner = llm.engine.runner
    rows = range(runner.sizes.max_num_seqs)
    scripts = {row: [*p, *c] for row, p, c in zip(rows, prompts, continuations, strict=False)}
    real = runner.acts.draft
    runner.acts.draft = ScriptedDraft(runner, scripts)
    try:
        return llm.generate(prompts, params, use_tqdm=False)
    finally:
        runner.acts.draft = real


def test_oracle_drafts_are_all_accepted(greedy, prompts, references):
    llm = LLM(
        "demo",
        {"model": "demo", "num_speculative_tokens": K},
        max_num_seqs=3,
        max_model_len=512,
        device="cpu",
    )
    outputs = run_scripted(llm, prompts[:3], greedy(41), references[:3])
    assert [o.outputs[0].token_ids for o in outputs] == [r[:41] for r in references[:3]]
    assert {count for o in outputs for count in o.stats.num_accepted} == {K}
    assert {o.stats.num_rounds for o in outputs} == {40 // (K + 1)}


def test_garbage_drafts_are_all_rejected(greedy, prompts, references):
    llm = LLM(
        "demo",
        {"model": "demo", "num_speculative_tokens": K},
        max_num_seqs=3,
        max_model_len=512,
        device="cpu",
    )
    garbage = [[(token + 1) % 4096 for token in reference] for reference in references[:3]]
    outputs = run_scripted(llm, prompts[:3], greedy(24), garbage)
    assert [o.outputs[0].token_ids for o in outputs] == [r[:24] for r in references[:3]]
    assert {count for o in outputs for count in o.stats.num_accepted} == {0}


@pytest.mark.parametrize("draft", ["demo/eagle3", "demo/eagle1"])
def test_draft_cache_equals_a_prefill_of_the_committed_tokens(greedy, prompts, draft):
    speculation = {"model": draft, "num_speculative_tokens": 3}
    sizes = {"max_num_seqs": 1, "max_model_len": 512, "device": "cpu"}
    after_rounds = LLM("demo", speculation, **sizes)
    from_scratch = LLM("demo", speculation, **sizes)
    [output] = after_rounds.generate([prompts[1]], greedy(40), use_tqdm=False)
    tokens = prompts[1] + output.outputs[0].token_ids
    from_scratch.generate([tokens[:-1]], greedy(1), use_tqdm=False)
    rounds, scratch = (cache_rows(llm, len(tokens) - 1) for llm in (after_rounds, from_scratch))
    assert torch.equal(rounds, scratch)
    assert rounds.abs().sum() > 0


def cache_rows(llm, num_tokens):
    """Draft keys and values of the only request, [L, 2, tokens, G, C], in the first blocks."""
    cache = llm.engine.runner.draft_cache
    return cache.transpose(3, 4).flatten(2, 3)[:, :, :num_tokens]


def test_a_prompt_beyond_the_drafts_own_max_position_embeddings_keeps_its_acceptance(
    tmp_path, greedy, prompts
):
    short = shutil.copytree(demo_directory("eagle3"), tmp_path / "eagle3")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    prompt = prompts[0] + prompts[1] + prompts[2]
    assert len(prompt) > 128
    rounds = []
    for draft in ("demo/eagle3", short):
        llm = LLM(
            "demo", {"model": draft, "num_speculative_tokens": 3}, max_num_seqs=1, device="cpu"
        )
        [output] = llm.generate([prompt], greedy(60), use_tqdm=False)
        rounds.append(output.stats.rounds)
    assert rounds[0] == rounds[1]
    assert sum(r.num_accepted for r in rounds[0]) > 0.5 * len(rounds[0])
