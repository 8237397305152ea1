"""How long does this host take for the masks of a step? No model and no GPU is needed.

    python -m scripts.guided_masks
    python -m scripts.guided_masks DIR/tokenizer.json --batch 32 -k 5 --schemas "tool call"

As many guided requests as --batch run at all times, under the JSON schemas of
tests/e2e/guided_cases.py. Their texts are drawn from what the grammars allow; of 10 drafts, 7 are
the text's tokens. The tokenizer is the demo's, with pairs of its tokens added up to 128,000, unless
one is given. Grammars are compiled as requests arrive, so the first steps are cold.

Prints a table and a line of JSON. The processor time of the slowest walk bounds what a host with a
processor for each walk needs, however busy this one is; that of all walks, what one processor
needs.
"""

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np

from specdec.bench.report import Row, table, write_json
from specdec.guided.grammars import Matcher
from specdec.guided.guides import Guides
from specdec.guided.mask_threads import MaskThreads
from specdec.guided.step_masks import GuidedSlot, row_masks
from specdec.requests.structured_outputs import StructuredOutputsParams
from specdec.requests.tokenizer import Tokenizer
from specdec.stepping.results import PendingResult, Proposals
from tests.e2e.guided_cases import SCHEMAS
from weights.demo import demo_directory

VOCAB, NUM_TOKENS = 128_256, 128_000  # padded, as Llama's
EOS = 1
FIRST = 10  # steps of a process


class WalkTime(NamedTuple):
    """A walk of a guide, seconds. began: by time.perf_counter()."""

    began: float
    wall: float
    processor: float
    thread: int


@dataclass(slots=True)
class Drawn:
    """A request: the text that it will have, and how much of it it has."""

    guide: Matcher
    text: list[int]
    num_done: int = 0
    num_rounds: int = 0

    def drafts(self, rng: random.Random, K: int) -> list[int]:
        coming = [*self.text[self.num_done : self.num_done + K], *[EOS] * K][:K]
        return [token if rng.random() < 0.7 else rng.randrange(2, 4096) for token in coming]

    def take(self, drafts: Sequence[int]) -> None:
        """A round: the drafts that hold, and a token more."""
        coming = self.text[self.num_done :]
        pairs = zip(drafts, coming, strict=False)
        held = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        self.guide.advance(coming[: held + 1])
        self.num_done += held + 1
        self.num_rounds += 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", nargs="?", type=Path, help="default: the demo's, widened")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=list(SCHEMAS))
    parser.add_argument("--json", type=Path, help="write the last line's JSON to a file too")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    text = args.tokenizer.read_text() if args.tokenizer else json.dumps(widened(NUM_TOKENS))
    source = cast(Tokenizer, SimpleNamespace(as_json=lambda: text))
    schemas = list(islice(cycle(args.schemas), args.num_requests))
    texts = list(drawn_texts(Guides(source, VOCAB, [EOS]), schemas, args.max_tokens))
    with recorded_walks() as walks:
        steps = list(run(Guides(source, VOCAB, [EOS]), schemas, texts, args, walks))
    rows = list(figures(steps))
    print(table(rows))
    write_json("scripts.guided_masks", {**vars(args), "results": rows}, args.json)


def widened(num_tokens: int) -> dict[str, Any]:
    """The demo's tokenizer.json, with tokens made of two that it has, the most frequent first."""
    found: dict[str, Any] = json.loads((demo_directory("target") / "tokenizer.json").read_text())
    model = found["model"]
    vocab: dict[str, int] = model["vocab"]
    words = [token for token in vocab if token.lstrip("\u0120").isalpha()]
    inner = [token for token in words if token.isalpha() and token.isascii()]
    pairs = ((words[i], inner[total - i]) for total in count() for i in _ranks(total, words, inner))
    for first, second in pairs:
        if len(vocab) == num_tokens:
            break
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            model["merges"].append([first, second])
    return found


def _ranks(total: int, first: Sequence[str], second: Sequence[str]) -> range:
    return range(max(total - len(second) + 1, 0), min(total + 1, len(first)))


def drawn_texts(guides: Guides, schemas: Sequence[str], length: int) -> Iterator[list[int]]:
    """A text under each schema: tokens that its masks allow, mostly those of low ids."""
    for seed, schema in enumerate(schemas):
        rng = np.random.default_rng(seed)
        guide = compiled(guides, schema)
        text: list[int] = []
        while len(text) < length:
            [mask] = guide.masks(())
            ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            low = ids[ids < 4096]
            if len(ids) == 0 or ids.tolist() == [EOS]:
                break
            text.append(int(rng.choice(low if len(low) and rng.random() < 0.8 else ids)))
            if text[-1] == EOS:
                break
            guide.advance(text[-1:])
        yield text


def compiled(guides: Guides, schema: str) -> Matcher:
    return cast(Matcher, guides.compile(StructuredOutputsParams(json=SCHEMAS[schema])))


@contextmanager
def recorded_walks() -> Iterator[list[WalkTime]]:
    """The walks of all threads, as they end."""
    found: list[WalkTime] = []
    masks = Matcher.masks

    def timed(self: Matcher, drafts: Sequence[int]) -> list[bytes]:
        began, processor = time.perf_counter(), time.thread_time()
        result = masks(self, drafts)
        wall = time.perf_counter() - began
        processor = time.thread_time() - processor
        found.append(WalkTime(began, wall, processor, threading.get_ident()))
        return result

    with patch.object(Matcher, "masks", timed):
        yield found


class StepTime(NamedTuple):
    """Milliseconds of the host for the masks of a step, and of a processor for its walks."""

    host: float
    slowest: float
    all_walks: float
    num_threads: int
    num_rows: int


def run(
    guides: Guides,
    schemas: Sequence[str],
    texts: Sequence[list[int]],
    args: argparse.Namespace,
    walks: list[WalkTime],
) -> Iterator[StepTime]:
    """All requests, --batch at a time."""
    K, rng, threads = args.num_speculative_tokens, random.Random(0), MaskThreads()
    waiting = iter(zip(schemas, texts, strict=True))
    running: list[Drawn] = []
    while True:
        arrived = islice(waiting, args.batch - len(running))
        running += [Drawn(compiled(guides, schema), text) for schema, text in arrived]
        if not running:
            return
        drafts = [request.drafts(rng, K) for request in running]
        pending = SimpleNamespace(read_proposals=lambda drafts=drafts: Proposals(drafts))
        slots = [
            GuidedSlot(
                request.guide,
                b * (K + 1),
                K if request.num_rounds else 0,
                (cast(PendingResult, pending), b),
            )
            for b, request in enumerate(running)
        ]
        walks.clear()
        began = time.perf_counter()
        found = row_masks(threads, slots)
        host = time.perf_counter() - began
        seconds = [walk.processor for walk in walks]
        num_threads = len({walk.thread for walk in walks})
        yield StepTime(
            1e3 * host, 1e3 * max(seconds), 1e3 * sum(seconds), num_threads, len(found.row_X)
        )
        for request, row in zip(running, drafts, strict=True):
            request.take(row if request.num_rounds else ())
        running = [request for request in running if request.num_done < len(request.text)]


def figures(steps: Sequence[StepTime]) -> Iterator[Row]:
    for name, part in (("all", steps), (f"first {FIRST}", steps[:FIRST])):
        host = [step.host for step in part]
        yield {
            "steps": name,
            "count": len(part),
            "rows masked": sum(step.num_rows for step in part) / len(part),
            "threads": sum(step.num_threads for step in part) / len(part),
            "host ms p50": float(np.percentile(host, 50)),
            "host ms p99": float(np.percentile(host, 99)),
            "host ms max": max(host),
            "all walks, cpu ms p50": float(np.percentile([step.all_walks for step in part], 50)),
            "all walks, cpu ms p99": float(np.percentile([step.all_walks for step in part], 99)),
            "slowest walk, cpu ms p99": float(np.percentile([step.slowest for step in part], 99)),
            "max": max(step.slowest for step in part),
            "steps over 2 ms": sum(each > 2 for each in host),
        }


if __name__ == "__main__":
    main()
