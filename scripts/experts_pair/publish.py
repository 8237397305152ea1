"""The files of the pair with experts, as published models have them."""

import json
import shutil
from pathlib import Path

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.experts_pair.attention import Sizes
from scripts.experts_pair.corpus import BOS, EOS
from scripts.experts_pair.eagle3 import Eagle3
from scripts.experts_pair.target import Target
from weights.demo import demo_directory


def save_target(target: Target, directory: Path) -> None:
    """Write config.json as transformers does, the weights, and the bundled tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = target.sizes
    config = transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=sizes.V,
        hidden_size=sizes.D,
        intermediate_size=sizes.chosen * sizes.I,
        num_hidden_layers=sizes.L,
        num_attention_heads=sizes.H,
        num_key_value_heads=sizes.G,
        head_dim=sizes.C,
        num_experts=sizes.E,
        num_experts_per_tok=sizes.chosen,
        moe_intermediate_size=sizes.I,
        norm_topk_prob=True,
        rms_norm_eps=sizes.eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.theta},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    transformers.GenerationConfig(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(directory)
    save_tensors(target.published(), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_directory("target") / name, directory / name)


def save_head(head: Eagle3, sizes: Sizes, directory: Path) -> None:
    """Write config.json and the weights in the reference's layout of EAGLE-3."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.D,
        "intermediate_size": sizes.draft_I,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.H,
        "num_key_value_heads": sizes.G,
        "head_dim": sizes.C,
        "vocab_size": sizes.V,
        "draft_vocab_size": sizes.W,
        "max_position_embeddings": 2048,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_tensors(head.published(sizes.V), directory)


def load_target(directory: Path, sizes: Sizes | None = None) -> Target:
    """Read a target to train a head for. sizes: None: of what save_target wrote"""
    target = Target(sizes or Sizes())
    files = sorted(directory.glob("*.safetensors"))
    target.adopt({name: weight for file in files for name, weight in load_file(file).items()})
    return target.requires_grad_(False)


def save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    print(f"saved {file}, {file.stat().st_size:,} bytes", flush=True)
