"""Make a DSpark head for the bundled target, within a number of seconds, and measure it.

    python -m scripts.dspark_head.make OUT                      # on a GPU: 200 seconds
    python -m scripts.dspark_head.make OUT --device cpu --corpus-seconds 5 --seconds 100

Writes OUT/config.json and OUT/model.safetensors as soon as the head is trained, in SpecForge's
layout of DSpark, which has no copies of the target's embedding and head. Then prints what is
accepted in the greedy texts of the bundled prompts, which were not trained on.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from scripts.dspark_head.accepted import accepted
from scripts.dspark_head.head import BLOCK, MASK, NUM_LAYERS, RANK, SIZES, TAPS, DSpark
from scripts.dspark_head.train import BATCH, train_head
from scripts.experts_pair.corpus import BOS, EOS, make_corpus
from scripts.experts_pair.publish import load_target, save_tensors
from scripts.experts_pair.rows import Rows
from weights.demo import demo_directory

SAVING = 3.0  # seconds, for what is written after training


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="until the head is written")
    parser.add_argument("--corpus-seconds", type=float, default=22.0, help="at most")
    parser.add_argument("--corpus", type=Path, help="what scripts.experts_pair.corpus wrote")
    parser.add_argument("--device", default="cuda", choices=tuple(BATCH))
    return parser.parse_args()


def main() -> None:
    given, start = parse_args(), time.monotonic()
    # before the device is used: it does not outlive a fork
    corpus = make_corpus(given.corpus_seconds) if given.corpus is None else np.load(given.corpus)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each number of keys
    target = load_target(demo_directory("target"), SIZES).to(given.device)
    seconds = given.seconds - SAVING - (time.monotonic() - start)
    head = train_head(target, Rows(corpus, given.device), seconds, given.device)
    save_head(head, given.out)
    print(f"written after {time.monotonic() - start:.1f} s", flush=True)
    for K in (3, 6):
        num_rounds, at = accepted(target, head, K)
        shown, mean = " ".join(map(str, at)), 1 + sum(at) / num_rounds
        print(f"| K = {K}, 24 prompts | {num_rounds:,} | {shown} | {mean:.3f} |", flush=True)


def save_head(head: DSpark, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    of_draft = {
        "projector_type": "dspark",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [boundary - 1 for boundary in TAPS],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "hidden_size": SIZES.D,
        "intermediate_size": SIZES.draft_I,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": SIZES.H,
        "num_key_value_heads": SIZES.G,
        "head_dim": SIZES.C,
        "vocab_size": SIZES.V,
        "max_position_embeddings": 2048,
        "rms_norm_eps": SIZES.eps,
        "rope_theta": SIZES.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "num_target_layers": SIZES.L,
        "torch_dtype": "bfloat16",
        "dflash_config": of_draft,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_tensors(head.published(), directory)


if __name__ == "__main__":
    main()
