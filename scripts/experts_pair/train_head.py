"""Train an EAGLE-3 head for the target with experts, and write it in the reference's layout.

A quarter of the time the target writes, greedily and sampled, on from the corpus's rows; the head
learns from that and from the corpus. Its loss is the cross entropy with the target's distribution
over the draft vocabulary, in unrolled steps (arXiv 2503.01840, training-time test).
"""

import time

import torch
from torch import Tensor

from scripts.experts_pair.attention import Sizes
from scripts.experts_pair.eagle3 import TAPS, Eagle3
from scripts.experts_pair.generate import generate
from scripts.experts_pair.pace import Pace
from scripts.experts_pair.rows import Rows
from scripts.experts_pair.target import Target

STEPS, DECAY = 5, 0.8  # unrolled; how much less each counts than the one before
WRITING = 0.25  # of the time
PROMPT, LENGTH = 40, 320  # tokens of a prompt, and of a row
WRITERS = {"cuda": 3072, "cpu": 16}  # rows that are written at a time
HELD_OUT = 16  # one row of so many is not trained on
BATCH = {"cuda": 64, "cpu": 4}  # rows


def train_head(target: Target, rows: Rows, seconds: float, device: str) -> Eagle3:
    """Train until the time is over; prints losses, and how often head and target agree."""
    start = time.monotonic()
    written = write(target, rows, seconds * WRITING, device)
    ids_W = draft_vocabulary(written[:, PROMPT:], target.sizes)
    held_out, written = written.tensor_split([len(written) // HELD_OUT])
    embedding = target.embed_tokens.weight.detach()
    head = Eagle3(target.sizes, ids_W, embedding, target.norm.weight.detach()).to(device)
    pace = Pace(head, seconds - (time.monotonic() - start), most=2e-3, decay=0.01)
    while pace.goes_on():
        picked = torch.randint(len(written), (BATCH[device],), device=device)
        tokens = torch.cat([written[picked].long(), rows.draw(BATCH[device] // 3, LENGTH)])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, agreed = unrolled(target, head, tokens)
        pace.step(loss)
        if pace.is_to_report():
            print(f"head: {pace} loss {loss:.3f} agreed {shown(agreed)}", flush=True)
    with torch.no_grad():
        _, agreed = unrolled(target, head, held_out[:256].long())
    took = time.monotonic() - start
    print(f"head: on text not trained on {shown(agreed)}, {took:.1f} s", flush=True)
    return head


def write(target: Target, rows: Rows, seconds: float, device: str) -> Tensor:
    """Let the target write, at least once, until the time is over: [rows, LENGTH]."""
    start, found = time.monotonic(), []
    temperature_B = (torch.arange(WRITERS[device], device=device) // 2 % 2).float()
    while not found or time.monotonic() - start < seconds:
        prompts = rows.draw(WRITERS[device], PROMPT)
        found.append(generate(target, prompts, LENGTH, temperature_B).int())
        found[-1][0, 0].item()  # wait for the device, else the time says nothing
    written = torch.cat(found)
    took = time.monotonic() - start
    print(f"head: {written.numel() / 1e6:.2f} M tokens written in {took:.1f} s", flush=True)
    return written


def draft_vocabulary(written: Tensor, sizes: Sizes) -> Tensor:
    """Take the ids that the target writes most, in order."""
    counts_V = torch.bincount(written.flatten(), minlength=sizes.V)
    ids_W = counts_V.topk(sizes.W).indices.sort().values
    share = float(counts_V[ids_W].sum() / counts_V.sum())
    print(f"head: the {sizes.W} draft tokens are {share:.1%} of the target's text", flush=True)
    return ids_W


def unrolled(target: Target, head: Eagle3, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and for each step how often head and target agree [STEPS].

    Row t has the hidden states of t and in step j the token t + 1 + j; what it predicts is what
    the target says after that token.
    """
    with torch.no_grad():
        boundaries, *_ = target(tokens_BS)
        features_BSE = torch.cat([boundaries[i] for i in TAPS], -1)
        teacher_BSV = target.logits(boundaries[-1]).float()
        embed_BSD, best_BS = boundaries[0], teacher_BSV.argmax(-1)
        probs_BSW = teacher_BSV[..., head.ids_W].softmax(-1)
        position_W = torch.full((teacher_BSV.shape[-1],), -1, device=tokens_BS.device)
        position_W[head.ids_W] = torch.arange(len(head.ids_W), device=tokens_BS.device)
        draft_best_BS = position_W[best_BS]  # -1: not in the draft vocabulary
    embeds = [embed_BSD.roll(-1 - step, 1) for step in range(STEPS)]
    loss, agreed = tokens_BS.new_zeros((), dtype=torch.float32), []
    for step, logits_BSW in enumerate(head(features_BSE, embeds)):
        end = tokens_BS.shape[1] - 1 - step  # rows whose token is there
        logits, best = logits_BSW[:, :end].float(), draft_best_BS[:, 1 + step :]
        losses = -(probs_BSW[:, 1 + step :] * logits.log_softmax(-1)).sum(-1)
        is_covered = (best >= 0).float()
        loss = loss + DECAY**step * (losses * is_covered).sum() / is_covered.sum()
        agreed.append((logits.argmax(-1) == best).float().mean().detach())
    return loss, torch.stack(agreed)


def shown(agreed: Tensor) -> str:
    """Show agreement by step, and the acceptance length that it predicts for 3 drafts."""
    by_step = " ".join(f"{each:.3f}" for each in agreed.tolist())
    return f"{by_step}, so {1 + float(agreed[:3].cumprod(0).sum()):.2f} tokens a round of 3 drafts"
