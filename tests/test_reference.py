"""The reference writes what transformers does: the demo's recorded tokens, tiny targets' logits."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.reference import Reference

DEMO = Path(__file__).parent.parent / "weights" / "demo"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
TARGETS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "llama-llama3": {
        "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "llama-yarn": {
        "rope_parameters": {**YARN, "beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    },
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 9},
    "qwen2": {},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-unnormed": {**EXPERTS, "norm_topk_prob": False},
    "qwen3-yarn": {"rope_parameters": {**YARN, "beta_fast": 4.0, "truncate": False}},
}


@pytest.mark.parametrize(
    "index",
    [0, 2, *(pytest.param(i, marks=pytest.mark.slow) for i in range(24) if i not in (0, 2))],
)
def test_the_demo_target_writes_its_recorded_tokens(index):
    recorded = json.loads((DEMO / "prompts.json").read_text())
    tokens = Reference(DEMO / "target").greedy(
        recorded["prompts"][index], recorded["max_new_tokens"]
    )
    assert tokens == recorded["greedy_float32"][index]


@pytest.mark.parametrize("name", TARGETS)
def test_logits_hidden_and_boundaries_equal_transformers(name, tmp_path):
    model = random_target(name.split("-")[0], **TARGETS[name])
    model.save_pretrained(tmp_path)
    tokens = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None], output_hidden_states=True)

    outputs = Reference(tmp_path).forward(tokens.tolist())

    torch.testing.assert_close(outputs.logits_TV, expected.logits[0], rtol=1e-4, atol=1e-4)
    # transformers gives the last hidden state behind the final norm, all others raw
    *raw, hidden = (hidden[0] for hidden in expected.hidden_states)
    torch.testing.assert_close(outputs.hidden_TD, hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.boundaries[:-1], raw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TARGETS if "rope_parameters" in TARGETS[name]])
def test_a_rope_kind_that_is_lost_is_seen(name, tmp_path):
    model = random_target(name.split("-")[0], **TARGETS[name])
    model.save_pretrained(tmp_path)
    reference, tokens = Reference(tmp_path), list(range(40))
    scaled = reference.forward(tokens).logits_TV
    reference.layer.rope.kind = "default"
    assert (reference.forward(tokens).logits_TV - scaled).abs().max() > 0.1


def test_cached_rows_equal_recomputed_rows():
    reference, tokens, cache = Reference(DEMO / "target"), list(range(30)), {}
    parts = [reference.forward(tokens[a:b], cache).logits_TV for a, b in ((0, 7), (7, 8), (8, 30))]
    torch.testing.assert_close(
        torch.cat(parts), reference.forward(tokens).logits_TV, rtol=1e-4, atol=1e-4
    )


def random_target(model_type: str, **changes) -> transformers.PreTrainedModel:
    """Two layers, weights large enough for every bias, norm and rotation to show in the logits."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(model_type, **(sizes | heads | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.data = noise + 1 if "norm" in name else noise
    return model
