"""How do many GPUs serve best: as one engine, as two of half of them each, or an engine on each?

    python -m scripts.many_gpus DIR/target --draft DIR/eagle3 --gpus 4 --json FILE
    python -m scripts.many_gpus demo --draft demo --gpus 2 --device cpu --batch 4 --max-tokens 16

Sends the pair's prompts over HTTP, --batch at a time, to a server on one GPU, to one on all, to two
on half of them each, and to a replica on each behind Ray Serve (extra `ray`): a wave that is not
timed, then --waves. Prints a table and a last line of JSON; exit code 1 if tokens differ.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from scripts.write_json import write_json
from specdec.bench.pair import read_prompts
from specdec.bench.report import Row, percentile, table
from specdec.start.locate import locate
from tests.served import closed_loop, free_port, served


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("--draft", help="default: plain decoding")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ways", default="one,all,halves,replicas")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.gpus < 2 or args.gpus % 2:
        parser.error(f"--gpus {args.gpus}: give an even number, 2 or more")
    return args


@contextmanager
def servers(args: argparse.Namespace, size: int, count: int = 1) -> Iterator[list[str]]:
    """Run servers of `size` GPUs each, side by side; give their addresses."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus)))).split(",")
    words = [f"--device={args.device}", f"--max-num-seqs={args.batch}", "--no-prefix-caching"]
    words += [f"--max-model-len={args.max_model_len}", f"--tensor-parallel-size={size}"]
    with ExitStack() as stack:
        parts = [given[i * size : (i + 1) * size] for i in range(count)]
        all_served = [served(args.target, args.draft, *words, gpus=part) for part in parts]
        yield [stack.enter_context(each) for each in all_served]


@contextmanager
def replicas(args: argparse.Namespace) -> Iterator[list[str]]:
    """Run an engine on each GPU behind Ray Serve; give the address of its proxy."""
    import ray
    from ray import serve

    from specdec.fleet import build_app

    app = {"model": args.target, "speculative_config": {"model": args.draft} if args.draft else {}}
    app |= {"device": args.device, "max_num_seqs": args.batch, "enable_prefix_caching": False}
    app |= {"max_model_len": args.max_model_len, "deployment": {"num_replicas": args.gpus}}
    gpus, port = {"num_gpus": 0 if args.device == "cpu" else args.gpus}, free_port()
    ray.init(num_cpus=args.gpus, **gpus, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(build_app(app))
        yield [f"127.0.0.1:{port}"]
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    args = parse_args()
    prompts = read_prompts(locate(args.target, "target"), None)[: args.num_prompts]
    args.max_model_len = max(map(len, prompts)) + args.max_tokens
    n, body = args.gpus, {"max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [json.dumps({**body, "prompt": each, "return_token_ids": True}) for each in prompts]
    ways = {"one": partial(servers, args, 1), "all": partial(servers, args, n)}
    ways |= {"halves": partial(servers, args, n // 2, 2), "replicas": partial(replicas, args)}
    rows: list[Row] = []
    known: list[list[int]] = []
    speeds: list[float] = []
    for way in args.ways.split(","):
        with ways[way]() as addresses:
            answers = closed_loop(addresses, bodies, args.batch)
            began = time.perf_counter()
            timed = closed_loop(addresses, bodies * args.waves, args.batch)
            speeds.append(len(timed) * args.max_tokens / (time.perf_counter() - began))
        tokens = [answer["choices"][0]["token_ids"] for answer, _ in (*answers, *timed)]
        known = known or tokens[: len(bodies)]
        differ = {
            i % len(bodies) for i, each in enumerate(tokens) if each != known[i % len(bodies)]
        }
        row = {"engines": way, "tokens_per_second": speeds[-1], "of_first": speeds[-1] / speeds[0]}
        row |= {"request_ms_p50": percentile([seconds for _, seconds in timed], 50)}
        rows.append(row | {"prompts_that_differ": len(differ)})
    print(table(rows))
    write_json("scripts.many_gpus", {**vars(args), "results": rows}, args.json)
    raise SystemExit(1 if any(row["prompts_that_differ"] for row in rows) else 0)


if __name__ == "__main__":
    main()
