"""Are tokens and logits the same for every K, batch and context, graph and eager, on a real pair?

Generates from all prompts of the pair for every setting and compares tokens, and a hash of the
float32 logits at every emitted position, with eager plain decoding one request at a time. Also at
contexts around tile and split borders and beyond (prompts joined), with K = 0, 3 and 5, one and
eight at a time. With --trees the same with draft trees, of which only the tokens are compared.
Prints one line per setting and a last line of JSON; exit code 1 if anything differs.

    python -m scripts.exact_matrix DIR/target --draft DIR/eagle3
    python -m scripts.exact_matrix DIR/target --draft DIR/eagle3 --trees 16x6x4,32x8x8
    python -m scripts.exact_matrix demo --draft demo -k 0,3 --batch 1,4 --num-prompts 4
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
from specdec.bench.serving import generate, greedy
from specdec.cli.options import tree
from specdec.engine import Engine
from specdec.requests.request import Request
from specdec.requests.stats import SpeculationStats
from specdec.sizes import MAX_TREE_REQUESTS, TreeShape

Drafts = int | TreeShape  # of a round: a chain's length, or a tree
MANY, LONG = 8, 9000  # requests at a time; of contexts of LONG tokens or more, two
CONTEXTS = "63,64,65,1023,1024,1025,1152,4096,4097,8191,8192,8193,16384,32000"


class LogitHashes:
    """Listens to an engine's steps: per request, the hashes of the logits of its tokens.

    Hashed on the device after each launch; which rows count is known once the requests have ended.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._first: dict[str, Tensor] = {}
        self._rounds: dict[str, list[Tensor]] = {}
        self._run_step = engine.runner.run_step
        engine.runner.run_step = self.run_step

    def run_step(self, rows, parts, **options):
        result = self._run_step(rows, parts, **options)
        hidden_TD = self.engine.runner.buffers.hidden_states
        Q = options["query_len"]
        R = len(rows) * Q
        if rows:
            hashes = hash_rows(self.engine, hidden_TD[:R]).view(len(rows), Q)
            for row, values in zip(rows, hashes, strict=True):
                self._rounds.setdefault(self._request_of(row), []).append(values)
        ends = itertools.accumulate((part.length for part in parts), initial=R)
        for part, end in zip(parts, list(ends)[1:], strict=True):
            if part.samples:
                [value] = hash_rows(self.engine, hidden_TD[end - 1 : end])
                self._first[self._request_of(part.state_row)] = value
        return result

    def of(self, request: Request) -> list[int]:
        """Of an ended request, one for each of its tokens. Rounds after its end do not count."""
        found = [self._first[request.request_id][None]]
        rounds = self._rounds.get(request.request_id, [])
        for values, record in zip(rounds, request.stats.rounds, strict=False):
            found.append(values[: record.num_accepted + 1])
        return torch.cat(found).tolist()[: len(request.token_ids)]

    def stop(self) -> None:
        del self.engine.runner.run_step  # and the class's own is there again

    def _request_of(self, row: int) -> str:
        running = self.engine.scheduler.running
        return next(request.request_id for request in running if request.state_row == row)


@torch.inference_mode()
def hash_rows(engine: Engine, hidden_TD: Tensor) -> Tensor:
    """[T] int64: each row's logits as bits, times odd numbers by place, summed with wrap-around."""
    logits_TV = engine.runner.target.model.logits(hidden_TD)
    place_V = torch.arange(logits_TV.shape[1], device=logits_TV.device) * 2654435761 + 1
    parts = [rows.view(torch.int32).long() for rows in logits_TV.split(64)]
    return torch.cat([(bits * place_V).sum(dim=1) for bits in parts])


def check_form(engine: Engine, is_eager: bool) -> None:
    """Of an engine that has run: graphs have served batches, unless it is eager."""
    replays = sum(each.replays.total() for each in engine.runner.graphs.counters().values())
    assert is_eager == (replays == 0), f"{is_eager=}, but graphs served {replays} batches"


def run(
    engine: Engine, drafts: Drafts, prompts: list[list[int]], batch: int, max_tokens: int
) -> tuple[list, list, float]:
    """Tokens and logit hashes of every prompt, none with trees, and the acceptance length."""
    tokens, hashes, stats = [], [], []
    for start in range(0, len(prompts), batch):
        listener = LogitHashes(engine) if isinstance(drafts, int) else None
        requests = generate(engine, greedy(prompts[start : start + batch], max_tokens))
        tokens += [request.token_ids for request in requests]
        if listener is not None:
            listener.stop()
            hashes += [listener.of(request) for request in requests]
        stats += [request.stats for request in requests]
    num_different = len({value for row in hashes for value in row})
    assert not hashes or num_different > len(tokens), "the hashes tell nothing apart"
    return tokens, hashes, SpeculationStats.merged(stats).mean_acceptance_length or 1.0


def equals(found: tuple[list, list], expected: tuple[list, list]) -> bool:
    """Of tokens and hashes; of tokens, where nothing was hashed."""
    return found[0] == expected[0] and found[1] in ([], expected[1])


def spec(
    drafts: Drafts, batch: int, longest: int, max_model_len: int, is_eager: bool
) -> EngineSpec:
    is_chain = isinstance(drafts, int)
    return EngineSpec(
        num_speculative_tokens=drafts if is_chain else drafts.num_levels,
        tree=None if is_chain else drafts,
        max_num_seqs=batch,
        max_tokens=longest,
        max_model_len=max_model_len,
        has_prefill_graphs=True,
        enforce_eager=is_eager,
    )


def matrix(pair: Pair, args: argparse.Namespace) -> list[dict[str, object]]:
    """All prompts, every K, tree and batch; the largest batch eagerly too; against eager K = 0."""
    prompts = pair.prompts[: args.num_prompts]
    alone = prompts[: args.num_alone]
    longest = max(map(len, prompts)) + args.max_tokens
    engine = pair.engine(spec(0, 1, longest, 1024, True))
    expected = run(engine, 0, alone, 1, args.max_tokens)[:2]
    num = len(expected[0])
    settings: list[tuple[Drafts, int, int, bool]] = []
    for is_eager, drafts in itertools.product((False, True), (*args.k, *args.trees)):
        most = max(args.batch) if isinstance(drafts, int) else MAX_TREE_REQUESTS
        batches = sorted({min(batch, most) for batch in args.batch})
        chosen = batches[-1:] if is_eager else batches
        settings += [(drafts, batch, batches[-1], is_eager) for batch in chosen]
    first: tuple[list, list] | None = None  # all prompts; some of them have not run alone
    rows = []
    for drafts, batch, largest, is_eager in tqdm(settings, desc="settings", disable=None):
        began = time.monotonic()
        engine = pair.engine(spec(drafts, largest, longest, 1024, is_eager), keep=1)
        some = prompts if batch > 1 else alone
        tokens, hashes, mean = run(engine, drafts, some, batch, args.max_tokens)
        same = [equals((tokens[:num], hashes[:num]), expected)]
        if len(tokens) == len(prompts):
            first = first or (tokens, hashes)
            same.append(equals((tokens, hashes), first))
        is_eager = is_eager or pair.device.type == "cpu"
        check_form(engine, is_eager)
        rows.append(report(drafts, batch, is_eager, "", len(tokens), all(same), mean, began))
    return rows


def contexts(pair: Pair, args: argparse.Namespace) -> list[dict[str, object]]:
    """Joined prompts of each length, K in 0, 3, 5, trees, batch 1 and 8, eagerly and in graphs.

    Against eager K = 0 at batch 1.
    """
    longest = max(args.contexts, default=0) + 64
    hows = (True,) if pair.device.type == "cpu" else (True, False)
    expected: dict[tuple[int, int], tuple[list, list]] = {}  # by length and number of prompts
    rows = []
    settings = list(itertools.product(hows, (0, 3, 5, *args.trees))) if args.contexts else []
    for is_eager, drafts in tqdm(settings, desc="contexts", disable=None):
        engine = pair.engine(spec(drafts, MANY, longest, longest, is_eager))
        for length, batch in itertools.product(args.contexts, (1, MANY)):
            began = time.monotonic()
            num = 2 if batch == 1 or length >= LONG else MANY
            turned = (pair.prompts[i:] + pair.prompts[:i] for i in range(num))
            prompts = [joined(each, length) for each in turned]
            tokens, hashes, mean = run(engine, drafts, prompts, batch, args.context_tokens)
            counts = {2, num}  # two have run alone, the others at least at K = 0
            found = {count: (tokens[:count], hashes[:count]) for count in counts}
            same = all(
                equals(each, expected.setdefault((length, count), each))
                for count, each in found.items()
            )
            check_form(engine, is_eager)
            rows.append(
                report(drafts, batch, is_eager, f"context {length}", num, same, mean, began)
            )
        del engine  # whose cache is large: the next one has no room beside it
        pair.drop()
    return rows


def report(
    drafts: Drafts,
    batch: int,
    is_eager: bool,
    what: str,
    num: int,
    same: bool,
    mean: float,
    began: float,
) -> dict:
    how = "eager" if is_eager else "graph"
    verdict = "same" if same else "DIFFERENT"
    seconds = time.monotonic() - began
    result = f"{num:2} prompts: {verdict}, AL {mean:.3f}, {seconds:.1f} s"
    is_chain = isinstance(drafts, int)
    shape = None if is_chain else f"{drafts.num_rows}x{drafts.num_levels}x{drafts.top_k}"
    name = f"K={drafts}" if is_chain else f"tree {shape}"
    print(f"{name} batch {batch:2} {how} {what:14} {result}", flush=True)
    k = drafts if is_chain else drafts.num_levels
    setting = {"k": k, "tree": shape, "batch": batch, "how": how, "what": what}
    return setting | {"prompts": num, "same": same, "mean": mean}


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    def trees(text: str) -> list[TreeShape]:
        try:
            return [tree("--trees", part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("-k", type=numbers, default=numbers("0,1,3,5,7"))
    parser.add_argument("--trees", type=trees, default=[], help="rows x levels x top_k: 16x6x4,...")
    parser.add_argument(
        "--batch", type=numbers, default=numbers("1,8,32,48"), help="at most 32 of trees"
    )
    parser.add_argument("--contexts", type=numbers, default=numbers(CONTEXTS))
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--num-alone", type=int, default=48, help="prompts that run one at a time")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--context-tokens", type=int, default=16, help="after a joined prompt")
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
