"""Are tokens and logits the same for every K, batch and context, graph and eager, on a real pair?

Generates from all prompts of the pair for every setting and compares tokens, and a hash of the float32 logits at every
emitted position, with eager plain decoding one request at a time. Also at contexts around tile and split borders and
beyond (prompts joined). Prints one line per setting and a last line of JSON; exit code 1 if anything differs.

    python -m scripts.exact_matrix DIR/target --draft DIR/eagle3
    python -m scripts.exact_matrix demo --draft demo -k 0,3 --batch 1,4 --num-prompts 4 --contexts 63,64,65
"""

import argparse
import itertools
import json
import sys
import time

import torch
from torch import Tensor
from tqdm import tqdm

from specdec.bench.pair import EngineSpec, Pair, joined, load_pair
from specdec.engine import Engine
from specdec.requests.params import SamplingParams
from specdec.requests.request import Request

CONTEXTS = "63,64,65,1023,1024,1025,4096,8191,8192,8193,16384,32000"


class LogitHashes:
    """Listens to an engine's steps: for each request the hashes of the logits that its tokens were chosen from.

    Hashed on the device behind each launch; which rows count is known when the requests have ended.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, runner = engine, engine.runner
        self._first: dict[str, Tensor] = {}
        self._rounds: dict[str, list[Tensor]] = {}
        self._run_chunk, self._run_round = runner.run_chunk, runner.run_round
        runner.run_chunk, runner.run_round = self.run_chunk, self.run_round

    def run_chunk(self, parts, *options):
        result = self._run_chunk(parts, *options)
        buffers = self.engine.runner.buffers
        hashes = hash_rows(self.engine, buffers.hidden_states[self._last_rows(parts)])
        for part, value in zip(parts, hashes, strict=True):
            if part.samples:
                self._first[self._request_of(part.row)] = value
        return result

    def run_round(self, rows, *options):
        result = self._run_round(rows, *options)
        Q = self.engine.runner.sizes.query_len
        hashes = hash_rows(self.engine, self.engine.runner.buffers.hidden_states[: len(rows) * Q])
        for row, values in zip(rows, hashes.view(len(rows), Q), strict=True):
            self._rounds.setdefault(self._request_of(row), []).append(values)
        return result

    def of(self, request: Request) -> list[int]:
        """Of an ended request, one for each of its tokens. Rounds behind its end are the last; they do not count."""
        found = [self._first[request.request_id][None]]
        for values, record in zip(
            self._rounds.get(request.request_id, []), request.stats.rounds, strict=False
        ):
            found.append(values[: record.num_accepted + 1])
        return torch.cat(found).tolist()[: len(request.token_ids)]

    def stop(self) -> None:
        runner = self.engine.runner
        runner.run_chunk, runner.run_round = self._run_chunk, self._run_round

    def _request_of(self, row: int) -> str:
        return next(
            request.request_id for request in self.engine.scheduler.running if request.row == row
        )

    def _last_rows(self, parts) -> Tensor:
        ends = itertools.accumulate(part.length for part in parts)
        return torch.tensor([end - 1 for end in ends], device=self.engine.runner.device)


@torch.inference_mode()
def hash_rows(engine: Engine, hidden_TD: Tensor) -> Tensor:
    """[T] int64: each row's logits as bits, times odd numbers by place, added up with wrap-around."""
    logits_TV = engine.runner.target.model.logits(hidden_TD)
    place_V = torch.arange(logits_TV.shape[1], device=logits_TV.device) * 2654435761 + 1
    return torch.cat(
        [(rows.view(torch.int32).long() * place_V).sum(dim=1) for rows in logits_TV.split(64)]
    )


def run(
    engine: Engine, prompts: list[list[int]], batch: int, max_tokens: int
) -> tuple[list, list, float]:
    """Tokens and logit hashes of every prompt, and the acceptance length."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens, hashes, stats = [], [], []
    for start in range(0, len(prompts), batch):
        listener = LogitHashes(engine)
        requests = engine.add_requests(
            [(prompt, params) for prompt in prompts[start : start + batch]]
        )
        while engine.has_unfinished:
            engine.step()
        engine.drain()
        listener.stop()
        for request in requests:
            tokens.append(request.token_ids)
            hashes.append(listener.of(request))
            stats.append(request.stats)
    assert len({value for row in hashes for value in row}) > len(tokens), (
        "the hashes tell nothing apart"
    )
    rounds = sum(s.num_rounds for s in stats)
    return tokens, hashes, 1 + sum(s.num_accepted_tokens for s in stats) / max(rounds, 1)


def spec(k: int, batch: int, longest: int, max_model_len: int, is_eager: bool) -> EngineSpec:
    return EngineSpec(
        num_speculative_tokens=k,
        max_num_seqs=batch,
        max_tokens=longest,
        max_model_len=max_model_len,
        has_prefill_graphs=True,
        enforce_eager=is_eager,
    )


def matrix(pair: Pair, args: argparse.Namespace) -> list[dict[str, object]]:
    """All prompts, every K and batch, graph; eager at the largest batch; against eager K = 0 at batch 1."""
    prompts = pair.prompts[: args.num_prompts]
    longest, largest = max(map(len, prompts)) + args.max_tokens, max(args.batch)
    expected = run(
        pair.engine(spec(0, 1, longest, 1024, True)), prompts[: args.num_alone], 1, args.max_tokens
    )[:2]
    settings = [(k, batch, False) for k in args.k for batch in args.batch] + [
        (k, largest, True) for k in args.k
    ]
    first: tuple[list, list] | None = (
        None  # a whole run to compare the prompts with that nobody ran alone
    )
    rows = []
    for k, batch, is_eager in tqdm(settings, desc="settings", disable=None):
        began, some = time.monotonic(), prompts if batch > 1 else prompts[: args.num_alone]
        tokens, hashes, mean = run(
            pair.engine(spec(k, largest, longest, 1024, is_eager), keep=1),
            some,
            batch,
            args.max_tokens,
        )
        first = first or ((tokens, hashes) if len(tokens) == len(prompts) else None)
        num = len(expected[0])
        same = [(tokens[:num], hashes[:num]) == expected]
        same += [(tokens, hashes) == first] if first and len(tokens) == len(prompts) else []
        is_eager = is_eager or pair.device.type == "cpu"
        rows.append(report(k, batch, is_eager, "", len(tokens), all(same), mean, began))
    return rows


def contexts(pair: Pair, args: argparse.Namespace) -> list[dict[str, object]]:
    """Joined prompts of each length, K in 0, 3, 5 and batch 1 and 8, against K = 0 at batch 1."""
    rows = []
    for length in args.contexts:
        expected = None
        prompts = [
            joined(pair.prompts[i:] + pair.prompts[:i], length)
            for i in range(8 if length < 9000 else 2)
        ]
        for k in (0, 3, 5):
            for batch in (1, len(prompts)):
                began = time.monotonic()
                engine = pair.engine(
                    spec(k, batch, max(args.contexts) + 64, max(args.contexts) + 64, True), keep=1
                )
                tokens, hashes, mean = run(
                    engine, prompts[: 2 if batch == 1 else 8], batch, args.context_tokens
                )
                expected = expected or (tokens, hashes)
                same = (tokens[:2], hashes[:2]) == expected
                rows.append(
                    report(k, batch, True, f"context {length}", len(tokens), same, mean, began)
                )
    return rows


def report(
    k: int, batch: int, is_eager: bool, what: str, num: int, same: bool, mean: float, began: float
) -> dict:
    how, verdict = "eager" if is_eager else "graph", "same" if same else "DIFFERENT"
    seconds = time.monotonic() - began
    print(
        f"K={k} batch {batch:2} {how} {what:14} {num:2} prompts: {verdict}, AL {mean:.3f}, {seconds:.1f} s",
        flush=True,
    )
    return {
        "k": k,
        "batch": batch,
        "how": how,
        "what": what,
        "prompts": num,
        "same": same,
        "mean": mean,
    }


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("-k", type=numbers, default=numbers("0,1,3,5,7"))
    parser.add_argument("--batch", type=numbers, default=numbers("1,8,32,48"))
    parser.add_argument("--contexts", type=numbers, default=numbers(CONTEXTS))
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-alone", type=int, default=48, help="prompts that run one at a time")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument(
        "--context-tokens", type=int, default=16, help="tokens behind a joined prompt"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    pair = load_pair(args.target, args.draft, args.device, args.dtype)
    rows = matrix(pair, args)
    pair.drop()
    rows += contexts(pair, args)
    print(json.dumps({"all_same": all(row["same"] for row in rows), "rows": rows}))
    sys.exit(0 if all(row["same"] for row in rows) else 1)


if __name__ == "__main__":
    main()
