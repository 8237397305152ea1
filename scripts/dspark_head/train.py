"""Train a DSpark head on what a target writes, greedily and sampled, and on the corpus.

At random places of each row a block is proposed, each of its places after the text's own tokens.
The loss is the cross entropy with the target's distribution, less along a block, minus the number
of drafts that the target would accept at the temperature of the row.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.dspark_head.head import BLOCK, SIZES, TAPS, DSpark
from scripts.experts_pair.generate import generate
from scripts.experts_pair.pace import Pace
from scripts.experts_pair.rows import Rows
from scripts.experts_pair.target import Target

WRITING = 0.25  # of the time
PROMPTS = {"cuda": (97, 25, 161, 49), "cpu": (161,)}  # tokens of prompts, in turn
LENGTH = 328  # tokens of a row
WRITERS = {"cuda": 4096, "cpu": 16}  # rows that are written at a time
HELD_OUT = {"cuda": 256, "cpu": 8}  # written rows that are not trained on
BATCH = {"cuda": (56, 8, 48), "cpu": (3, 1, 16)}  # written rows, rows of the corpus, anchors
LENGTHS = (8, 6, 3, 7, 6, 4)  # of blocks, in turn: fewer drafts are fewer rows, which others see
DECAY, ACCEPTED = 0.8, 1.0  # of the cross entropy along a block; how much acceptance counts


def train_head(target: Target, rows: Rows, seconds: float, device: str) -> DSpark:
    """Train until the time is over; prints losses, and how often head and target agree."""
    start = time.monotonic()
    written, temperature = write(target, rows, seconds * WRITING, device)
    left, num_held = seconds - (time.monotonic() - start), HELD_OUT[device]
    if left <= 0:
        raise SystemExit(f"of {seconds:.0f} s none is left to train in: give more --seconds")
    head = DSpark(SIZES, target.embed_tokens.weight.detach(), target.norm.weight.detach())
    head = head.to(device)
    pace = Pace(head, left, most=2e-3, decay=0.01)
    num_written, num_of_corpus, num_anchors = BATCH[device]
    while pace.goes_on():
        picked = torch.randint(num_held, len(written), (num_written,), device=device)
        tokens = torch.cat([written[picked].long(), rows.draw(num_of_corpus, LENGTH)])
        temperature_B = F.pad(temperature[picked], (0, num_of_corpus), value=1.0)
        R = LENGTHS[pace.num_steps % len(LENGTHS)]
        loss, _ = step(target, head, tokens, temperature_B, (num_anchors, R))
        pace.step(loss)
        if pace.is_to_report():
            report(f"{pace} loss {loss:.3f}", target, head, written[:num_held], temperature)
    took = time.monotonic() - start
    report(f"{took:.1f} s,", target, head, written[:num_held], temperature)
    return head


def write(target: Target, rows: Rows, seconds: float, device: str) -> tuple[Tensor, Tensor]:
    """Let the target write, at least once, until the time is over.

    Returns tokens [rows, LENGTH] and the temperature of each row, in a random order.
    """
    start, found = time.monotonic(), []
    temperature_B = (torch.arange(WRITERS[device], device=device) // 2 % 2).float()
    lengths = PROMPTS[device]
    while not found or time.monotonic() - start < seconds:
        prompts = rows.draw(WRITERS[device], lengths[len(found) % len(lengths)])
        found.append(generate(target, prompts, LENGTH, temperature_B).int())
        found[-1][0, 0].item()  # wait for the device, else the time says nothing
    written = torch.cat(found)
    order = torch.randperm(len(written), device=device)
    took = time.monotonic() - start
    print(f"head: {written.numel() / 1e6:.2f} M tokens written in {took:.1f} s", flush=True)
    return written[order], temperature_B.repeat(len(found))[order]


def step(
    target: Target, head: DSpark, tokens_BS: Tensor, temperature_B: Tensor, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the loss, and which drafts are the target's own choice [B, A, R].

    block: how many anchors, and rows of each. Row i has the tokens up to anchor + i before it.
    """
    A, R = block
    S, device = tokens_BS.shape[1], tokens_BS.device
    with torch.no_grad():  # in full precision, which is the engine's
        boundaries, *_ = target(tokens_BS)
        features_BSE = torch.cat([boundaries[i] for i in TAPS], -1)
        teacher_BSV = target.logits(boundaries[-1])
    anchors_A = torch.randperm(S - R, device=device)[:A] + 1
    places_AR = anchors_A[:, None] + torch.arange(R, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = head.rows(features_BSE, tokens_BS[:, anchors_A], anchors_A, R)
        before_BAR = tokens_BS[:, places_AR]
        logits = head.logits(hidden, before_BAR)
        confidence_BAR = head.confidence(hidden, before_BAR).float()
    log_q, log_p = logits.float().log_softmax(-1), teacher_BSV.log_softmax(-1)[:, places_AR]
    p = log_p.exp()
    best_BAR = log_p.argmax(-1)
    shared_BAR = torch.minimum(p, log_q.exp()).sum(-1)  # 1 - TV
    of_best_BAR = log_q.gather(-1, best_BAR[..., None])[..., 0]
    of_shared_BAR = shared_BAR.clamp_min(1e-6).log()
    log_accepted_BAR = torch.where(temperature_B[:, None, None] > 0, of_shared_BAR, of_best_BAR)
    weight_R = DECAY ** torch.arange(R, device=device)
    loss = -((p * log_q).sum(-1) * weight_R).sum(-1).mean() / weight_R.sum()
    loss = loss - ACCEPTED * log_accepted_BAR.cumsum(-1).exp().mean()
    loss = loss + F.binary_cross_entropy_with_logits(confidence_BAR, shared_BAR.detach())
    return loss, logits.argmax(-1) == best_BAR


@torch.no_grad()
def report(what: str, target: Target, head: DSpark, tokens: Tensor, temperature: Tensor) -> None:
    """Print by place how often drafts are the target's choice, if those before them are."""
    is_greedy = temperature[: len(tokens)] == 0
    shown = []
    for name, rows in (("greedy", tokens[is_greedy]), ("sampled", tokens[~is_greedy])):
        _, is_same = step(target, head, rows.long(), temperature[: len(rows)], (32, BLOCK))
        by_place = " ".join(f"{each:.3f}" for each in is_same.float().mean((0, 1)).tolist())
        length = 1 + is_same[..., :6].cumprod(-1).sum(-1).float().mean()
        shown.append(f"{name} {by_place}, {length:.2f} tokens a round of 6 drafts")
    print(f"head: {what} held out: {'; '.join(shown)}", flush=True)
