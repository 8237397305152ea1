"""Every emitted token is the maximum of transformers' float32 logits; a wrong one is found."""

import json

import pytest
import torch

from scripts import teacher_forced

FEW = ("--device", "cpu", "--num-prompts", "3", "--max-tokens", "24", "-k", "3")


def test_every_emitted_token_lies_at_the_maximum(capsys):
    with pytest.raises(SystemExit, match="0"):
        teacher_forced.main(FEW)

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["num_tokens"] == 72
    assert found["largest_gap"] <= found["margin"] == 1e-3


def test_a_wrong_token_is_over_the_margin(capsys, monkeypatch):
    right = teacher_forced.emitted

    def wrong(given, prompts, dtype):
        outputs = right(given, prompts, dtype)
        outputs[2][5] += 1
        return outputs

    monkeypatch.setattr(teacher_forced, "emitted", wrong)
    with pytest.raises(SystemExit, match="1"):
        teacher_forced.main(FEW)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["largest_gap"] > 1


def test_a_gap_belongs_to_the_token_after_its_prefix():
    prompts = teacher_forced.demo_prompts()["prompts"][:1]
    args = teacher_forced.parse_args([*FEW, "--num-prompts", "1"])
    greedy = teacher_forced.emitted(args, prompts, "float32")
    [whole] = teacher_forced.forced_gaps("demo", prompts, greedy)
    [later] = teacher_forced.forced_gaps("demo", [[*prompts[0], *greedy[0][:10]]], [greedy[0][10:]])
    torch.testing.assert_close(later, whole[10:], rtol=0, atol=1e-4)
