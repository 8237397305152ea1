"""What all tests share: Triton's interpreter where there is no GPU, and the bundled pair."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from weights.demo import demo_prompts


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The 48 prompts of the bundled pair, token ids."""
    return demo_prompts()["prompts"]


@pytest.fixture(scope="session")
def references() -> list[list[int]]:
    """The target's 160 greedy tokens in float32 for the first 24 prompts, from transformers."""
    return demo_prompts()["greedy_float32"]
