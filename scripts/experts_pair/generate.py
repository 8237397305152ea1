"""Text that a target writes, for a head to learn from."""

import torch
from torch import Tensor

from scripts.experts_pair.target import Target


@torch.no_grad()
def generate(target: Target, prompts_BP: Tensor, length: int, temperature_B: Tensor) -> Tensor:
    """Return [B, length] tokens, the prompts and what the target writes after them.

    temperature: for each row; 0: greedily
    """
    sizes, device = target.sizes, prompts_BP.device
    (B, P), is_cuda = prompts_BP.shape, device.type == "cuda"
    tokens_BS = prompts_BP.new_zeros(B, length)
    tokens_BS[:, :P] = prompts_BP
    cached = (2, B, sizes.G, length, sizes.C)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    cache = [tuple(torch.empty(cached, device=device, dtype=dtype)) for _ in range(sizes.L)]
    for start in (0, *range(P, length)):
        end = max(start + 1, P)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            boundaries, *_ = target(tokens_BS[:, start:end], start, cache)
            logits_BV = target.logits(boundaries[-1][:, -1]).float()
        if end < length:
            noise_BV = -torch.empty_like(logits_BV).exponential_().log()
            tokens_BS[:, end] = (logits_BV + temperature_B[:, None] * noise_BV).argmax(-1)
    return tokens_BS
