"""Train the target with experts on a corpus for some seconds.

The learning rate follows the time that has passed, so that it ends low whatever the machine.
"""

import time

import torch
import torch.nn.functional as F

from scripts.experts_pair.attention import Sizes
from scripts.experts_pair.pace import Pace
from scripts.experts_pair.rows import Rows
from scripts.experts_pair.target import Target

BALANCE = 0.02  # of the loss: the imbalance of experts
BATCH = {"cuda": (48, 768), "cpu": (8, 96)}  # rows, tokens of each


def train_target(rows: Rows, seconds: float, device: str) -> Target:
    """Train until the time is over; prints losses, and how often experts are chosen."""
    torch.manual_seed(0)
    target, start = Target(Sizes()).to(device), time.monotonic()
    pace = Pace(target, seconds, most=3e-3, decay=0.05)
    num_rows, length = BATCH[device]
    while pace.goes_on():
        tokens = rows.draw(num_rows, length + 1)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            boundaries, imbalance, shares = target(tokens[:, :-1])
            logits = target.logits(boundaries[-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        pace.step(loss + BALANCE * imbalance)
        if pace.is_to_report():
            found = f"loss {loss:.3f} imbalance {imbalance:.3f} least share {shares.min():.4f}"
            print(f"target: {pace} {found}", flush=True)
    with torch.no_grad():
        tokens = rows.held_out(8, length)
        boundaries, _, shares = target(tokens)
        logits = target.logits(boundaries[-1])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    took = time.monotonic() - start
    print(f"target: held-out loss {loss:.3f}, {took:.1f} s; shares by layer:", flush=True)
    for share_E in shares.tolist():
        print("  " + " ".join(f"{share:.3f}" for share in share_E), flush=True)
    return target
