"""The figures after a text, in lines of at most 60 columns, and what they say about the draft."""

import shlex
import textwrap
from collections import Counter

from specdec.requests.output import CompletionOutput, RequestOutput
from weights.errors import shown

COLUMNS = 60
SEPARATOR = " | "
LONGEST_STOP = 40  # characters shown of a stop string
# a draft that works reaches 1.1 at its worst; fewer rounds than this say little
LEAST_LENGTH = 1.1
LEAST_ROUNDS = 16


def figures(output: RequestOutput) -> str:
    """Tokens, why the text ended, acceptance, speed.

    The rate at position i: the share of rounds that accepted at least i drafts.
    """
    stats = output.stats
    parts = [f"{stats.num_generated_tokens} tokens in {stats.num_rounds} rounds"]
    parts.append(_endings(output) if output.finished else "interrupted")
    if stats.num_drafted_tokens:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        parts.append(f"acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"accepted per position {rates}")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.time_to_first_token is not None:
        parts.append(f"first token after {1e3 * stats.time_to_first_token:.0f} ms")
    return "\n".join(lines([part for part in parts if part]))


def _endings(output: RequestOutput) -> str:
    """Why the samples ended, each reason once with its count: "length (2), stop: '\\n'"."""
    counts = Counter(_ending(each) for each in output.outputs if each.finish_reason is not None)
    return ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counts.items())


def _ending(completion: CompletionOutput) -> str:
    """The reason; with the string or token that stopped it, if it is not the model's own."""
    reason = str(completion.finish_reason)
    if reason != "stop" or completion.stop_reason is None:
        return reason
    return f"stop: {shown(repr(completion.stop_reason), LONGEST_STOP)}"


def lines(parts: list[str]) -> list[str]:
    """Join the parts with bars; break at a bar, or within a part that is too long by itself."""
    found: list[str] = []
    for part in parts:
        joined = f"{found[-1]}{SEPARATOR}{part}" if found else part
        if len(joined) <= COLUMNS:
            found[-1:] = [joined]
        else:
            found += textwrap.wrap(part, COLUMNS)
    return found


def warning(output: RequestOutput, target: str, draft: str | None) -> str | None:
    """What to run where hardly any draft was accepted."""
    stats = output.stats
    length = stats.mean_acceptance_length
    if draft is None or not stats.num_drafted_tokens or length is None:
        return None
    if stats.num_rounds < LEAST_ROUNDS or length >= LEAST_LENGTH:
        return None
    command = shlex.join(["specdec", "verify", target, draft])
    return f"warning: hardly any draft is accepted; to find out why:\n{command}"
