"""What does HTTP cost beside AsyncLLM: in tokens per second, and in time to the first token?

    python -m scripts.http_cost /tmp/8b/target --draft /tmp/8b/eagle3 --json FILE
    python -m scripts.http_cost demo --draft demo --device cpu --batch 4 --requests 16

Sends the same requests through `specdec serve`, in a process of its own, by http.client in threads,
then through an AsyncLLM here: --batch at all times, then one after another. Prompts and answers are
those of the suite `loop`, greedy. Exit code 1 if a text differs. Needs the extra `server`.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

from scripts.write_json import write_json
from specdec import AsyncLLM, SamplingParams
from specdec.bench.loop import PROMPT_LENGTHS
from specdec.bench.pair import joined, read_prompts
from specdec.bench.report import Row, percentile, table
from specdec.start.locate import locate
from tests.served import Answer, post, served

MODEL_LEN = 512
Ask = Callable[[list[int]], Awaitable[Answer]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", nargs="?", default="demo")
    parser.add_argument("--draft", help="default: plain decoding")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--requests", type=int, default=512, help="in the loop")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--alone", type=int, default=100, help="one at a time")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


async def measure(ask: Ask, args: argparse.Namespace) -> tuple[Row, list[str]]:
    """Ask two for each that runs at a time, then the loop, then those alone; give all texts."""
    texts, chance = read_prompts(locate(args.target, "target"), None), random.Random(0)
    num_before, count = 2 * args.batch, 2 * args.batch + args.requests + args.alone
    prompts = [joined(texts, chance.randint(*PROMPT_LENGTHS), i) for i in range(count)]
    answers = await loop(ask, prompts[:num_before], args.batch)
    began = time.perf_counter()
    answers += await loop(ask, prompts[num_before : count - args.alone], args.batch)
    speed = args.requests * args.max_tokens / (time.perf_counter() - began)
    alone = [await ask(prompt) for prompt in prompts[count - args.alone :]]
    firsts = {f"first_text_ms_p{p}": percentile([each[0] for each in alone], p) for p in (50, 99)}
    return {"tokens_per_second": speed} | firsts, [text for _, text in (*answers, *alone)]


async def loop(ask: Ask, prompts: list[list[int]], batch: int) -> list[Answer]:
    """Ask all, `batch` at a time: when one ends, the next begins."""
    room = asyncio.Semaphore(batch)

    async def one(prompt: list[int]) -> Answer:
        async with room:
            return await ask(prompt)

    return await asyncio.gather(*map(one, prompts))


async def measure_llm(args: argparse.Namespace) -> tuple[Row, list[str]]:
    draft = None if args.draft is None else {"model": args.draft}
    options = {"device": args.device, "max_num_seqs": args.batch, "max_model_len": MODEL_LEN}
    llm = AsyncLLM(args.target, draft, **options)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)

    async def ask(prompt: list[int]) -> Answer:
        sent, first, text = time.perf_counter(), 0.0, ""
        async for output in llm.generate(prompt, params):
            text = output.outputs[0].text
            first = first or (time.perf_counter() - sent if text else 0.0)
        return first or time.perf_counter() - sent, text

    try:
        return await measure(ask, args)
    finally:
        llm.shutdown()


async def measure_http(args: argparse.Namespace) -> tuple[Row, list[str]]:
    body = {"max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    options = f"--device {args.device} --max-model-len {MODEL_LEN}"
    address = served(args.target, args.draft, *options.split(), "--max-num-seqs", str(args.batch))
    with address as where, ThreadPoolExecutor(args.batch) as threads:
        idle: list[HTTPConnection] = []

        async def ask(prompt: list[int]) -> Answer:
            connection = idle.pop() if idle else HTTPConnection(where)
            given = connection, json.dumps(body | {"prompt": prompt})
            found = await asyncio.get_running_loop().run_in_executor(threads, post, *given)
            idle.append(connection)
            return found

        return await measure(ask, args)


def main() -> None:
    args = parse_args()
    over_http, http_texts = asyncio.run(measure_http(args))
    direct, texts = asyncio.run(measure_llm(args))
    rows = [{"through": "HTTP"} | over_http, {"through": "AsyncLLM"} | direct]
    differ = [i for i, text in enumerate(texts) if http_texts[i] != text]
    print(table(rows), f"{len(texts)} texts, {len(differ)} differ: {differ}", sep="\n")
    write_json("scripts.http_cost", {**vars(args), "results": rows, "differ": differ}, args.json)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
