"""What does HTTP cost beside AsyncLLM: in tokens per second, and in time to the first token?

    python -m scripts.http_cost /tmp/8b/target --draft /tmp/8b/eagle3 --json FILE
    python -m scripts.http_cost demo --draft demo --device cpu --batch 4 --requests 16

The same requests twice: through `specdec serve`, in a process of its own, by a client on the
loopback that knows no more of HTTP than it needs; then through an AsyncLLM of this process. As many
as --batch run at all times; then they come one after another, for the time to the first token.
Prompts have 25 to 160 tokens, answers --max-tokens, greedy, with drafts as they pay. Prints a table
and a line of JSON; exit code 1 if a text differs.

Needs the extra `server`: pip install -e ".[server]".
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from specdec import AsyncLLM, SamplingParams
from specdec.bench.loop import PROMPT_LENGTHS
from specdec.bench.pair import read_prompts, turned
from specdec.bench.percentiles import percentile
from specdec.bench.report import Row, table, write_json
from specdec.start.locate import locate

WARMUP = 2  # requests for each that runs at a time
MODEL_LEN = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """first_text: seconds from the call."""

    first_text: float
    text: str


Ask = Callable[[list[int]], Awaitable[Answer]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="demo")
    parser.add_argument("--draft", help="default: plain decoding")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32, help="default: 32")
    parser.add_argument("--requests", type=int, default=512, help="in the loop, default: 512")
    parser.add_argument("--max-tokens", type=int, default=160, help="default: 160")
    parser.add_argument("--alone", type=int, default=100, help="one at a time, default: 100")
    parser.add_argument("--json", type=Path, help="write the figures to a file too")
    return parser.parse_args()


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """For the warm-up, the loop, and those that run alone; as in the suite `loop`."""
    texts = read_prompts(locate(args.target, "target"), None)
    chance = random.Random(0)
    count = WARMUP * args.batch + args.requests + args.alone
    return [turned(texts, i, chance.randint(*PROMPT_LENGTHS)) for i in range(count)]


async def measure(ask: Ask, args: argparse.Namespace) -> tuple[Row, list[str]]:
    """Figures, and the texts of all answers."""
    prompts = prompts_of(args)
    num_before = WARMUP * args.batch
    answers = await loop(ask, prompts[:num_before], args.batch)
    began = time.perf_counter()
    answers += await loop(ask, prompts[num_before : num_before + args.requests], args.batch)
    seconds = time.perf_counter() - began
    alone = [await ask(prompt) for prompt in prompts[num_before + args.requests :]]
    waits = [answer.first_text for answer in alone]
    figures: Row = {
        "tokens_per_second": args.requests * args.max_tokens / seconds,
        "first_text_ms_p50": percentile(waits, 50),
        "first_text_ms_p99": percentile(waits, 99),
    }
    return figures, [answer.text for answer in [*answers, *alone]]


async def loop(ask: Ask, prompts: list[list[int]], batch: int) -> list[Answer]:
    """As many run as `batch` says; one ends, and the next begins."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def client() -> None:
        for i, prompt in waiting:
            answers[i] = await ask(prompt)

    await asyncio.gather(*(client() for _ in range(batch)))
    return [answers[i] for i in range(len(prompts))]


# directly


async def measure_llm(args: argparse.Namespace) -> tuple[Row, list[str]]:
    """Through an AsyncLLM."""
    llm = AsyncLLM(
        args.target,
        None if args.draft is None else {"model": args.draft},
        device=args.device,
        max_num_seqs=args.batch,
        max_model_len=MODEL_LEN,
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)

    async def ask(prompt: list[int]) -> Answer:
        sent = time.perf_counter()
        first, text = 0.0, ""
        async for output in llm.generate(prompt, params):
            text = output.outputs[0].text
            first = first or (time.perf_counter() - sent if text else 0.0)
        return Answer(first or time.perf_counter() - sent, text)

    try:
        return await measure(ask, args)
    finally:
        llm.shutdown()


# through HTTP


async def measure_http(args: argparse.Namespace) -> tuple[Row, list[str]]:
    """Through `specdec serve`."""
    with served(args) as url:
        where = urlsplit(url)
        assert where.hostname is not None, url
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

        async def ask(prompt: list[int]) -> Answer:
            stream = idle.pop() if idle else None
            stream = stream or await asyncio.open_connection(where.hostname, where.port)
            answer = await post(*stream, body_of(prompt, args))
            idle.append(stream)
            return answer

        found = await measure(ask, args)
        for _, writer in idle:
            writer.close()
    return found


def body_of(prompt: list[int], args: argparse.Namespace) -> bytes:
    """A greedy completion, in parts as they come."""
    body = {
        "model": "target",
        "prompt": prompt,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> Answer:
    """One request over a connection that is kept."""
    sent = time.perf_counter()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first, text = 0.0, ""
    async for line in lines_of(reader):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"the server says: {event['error']}")
        text += event["choices"][0]["text"] if event["choices"] else ""
        first = first or (time.perf_counter() - sent if text else 0.0)
    return Answer(first or time.perf_counter() - sent, text)


async def lines_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of the body, which comes in chunks (RFC 9112, 7.1)."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head.lower():
        raise ValueError(f"no stream: {head.decode(errors='replace')}")
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line
    await reader.readexactly(2)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[str]:
    """A server in a process of its own; its address."""
    words = ["-m", "specdec", "serve", args.target, "--device", args.device, "--port", "0"]
    words += [] if args.draft is None else ["--draft", args.draft]
    words += ["--served-model-name", "target", "--max-num-seqs", str(args.batch)]
    words += ["--max-model-len", str(MODEL_LEN)]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with closing(process.stderr) as said:
        lines = []
        for line in said:
            lines.append(line)
            found = re.search(r"serving .* at (http://\S+)/v1", line)
            if found:
                break
        else:
            raise SystemExit("".join(lines))
        reading = threading.Thread(target=said.read)  # or the server would wait for a reader
        reading.start()
        try:
            yield found[1]
        finally:
            process.terminate()
            process.wait()
            reading.join()


def main() -> None:
    args = parse_args()
    over_http, http_texts = asyncio.run(measure_http(args))
    direct, texts = asyncio.run(measure_llm(args))
    rows = [{"through": "HTTP", **over_http}, {"through": "AsyncLLM", **direct}]
    differ = [i for i, both in enumerate(zip(http_texts, texts, strict=True)) if len({*both}) > 1]
    print(table(rows))
    print(f"{len(texts)} texts, {len(differ)} differ" + (f": requests {differ}" if differ else ""))
    write_json("scripts.http_cost", {**vars(args), "results": rows, "differ": differ}, args.json)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
