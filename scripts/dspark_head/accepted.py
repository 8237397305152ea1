"""What a target accepts of a head in texts that are known: greedy ones, by no engine.

All places of a text are drafted after at once; rounds then go from one to the next.
"""

import torch
from torch import Tensor

from scripts.dspark_head.head import TAPS, DSpark
from scripts.experts_pair.target import Target
from weights.demo import demo_prompts


@torch.no_grad()
def accepted(target: Target, head: DSpark, K: int) -> tuple[int, list[int]]:
    """Count the rounds of the bundled prompts' greedy texts, and those that accept at each place.

    A last round whose drafts reach beyond its text counts those within it.
    """
    num_rounds, at = 0, [0] * K
    device = head.embedding_VD.device
    found = demo_prompts()
    for prompt, text in zip(found["prompts"], found["greedy_float32"], strict=False):
        tokens_S = torch.tensor(prompt + text, device=device)
        equal_A = num_equal(target, head, tokens_S, len(prompt), K)
        place = 0
        while place < len(equal_A):
            num_rounds += 1
            for i in range(equal_A[place]):
                at[i] += 1
            place += equal_A[place] + 1
    return num_rounds, at


def num_equal(target: Target, head: DSpark, tokens_S: Tensor, start: int, K: int) -> list[int]:
    """Say for each place from start on how many drafts after it are the text's own tokens."""
    boundaries, *_ = target(tokens_S[None])
    features_BSE = torch.cat([boundaries[i] for i in TAPS], -1)
    anchors_A = torch.arange(start, len(tokens_S) - 1, device=tokens_S.device)
    before_A = tokens_S[anchors_A]
    hidden_ARD = head.rows(features_BSE, before_A[None], anchors_A, K)[0]
    padded = torch.nn.functional.pad(tokens_S, (0, K), value=-1)
    is_equal = []
    for i in range(K):
        before_A = head.logits(hidden_ARD[:, i], before_A).argmax(-1)
        is_equal.append(before_A == padded[anchors_A + 1 + i])
    return torch.stack(is_equal).cumprod(0).sum(0).tolist()
