"""`specdec batch`: answer the lines of a file, many at once, in their order."""

import asyncio
import sys
from collections import deque
from contextlib import closing
from dataclasses import replace

from specdec.cli.batch_file import Batch, opened
from specdec.cli.before_torch import server_options
from specdec.cli.choices import BatchOptions
from specdec.cli.figures import say_what_runs
from specdec.serve.async_llm import AsyncLLM
from specdec.serve.http.app import Application
from specdec.serve.http.batch import Answered, answer_line, answer_problem
from specdec.serve.http.options import NO_LIMIT

AHEAD = 4096  # answers that may wait for an earlier line, in memory


def run_batch(options: BatchOptions) -> None:
    """Look at both files, load, answer what is left."""
    with opened(options.input, options.output) as output:
        batch = Batch(options.input, options.output, output)
        if batch.num_done:
            done = f"{batch.num_done} of {batch.num_lines} lines are done"
            print(f"{options.output}: {done}", file=sys.stderr)
        if batch.num_done == batch.num_lines:
            return
        if options.ray is None:
            _answer_here(options, batch)
        else:
            _answer_on_ray(options, options.ray, batch)


def _answer_here(options: BatchOptions, batch: Batch) -> None:
    with AsyncLLM(options.target, options.speculation, **options.engine) as llm:
        say_what_runs(llm.llm)
        server = replace(server_options(options), host="localhost", max_waiting=NO_LIMIT)
        application = Application(llm, server)
        # as many lines wait as run, so that the engine never waits for them
        most_running = 2 * llm.llm.sizes.max_num_seqs
        with batch.writing():
            asyncio.run(_answer_all(application, batch, most_running))


async def _answer_all(application: Application, batch: Batch, most_running: int) -> None:
    """Write the answers in the order of the lines, each as soon as it can be."""
    app = application.app
    running: set[asyncio.Task[Answered]] = set()
    waiting: deque[asyncio.Task[Answered]] = deque()  # begun, in order, not written yet
    async with app.router.lifespan_context(app):
        try:
            for line in batch.lines():
                task = asyncio.create_task(answer_line(app, line))
                running.add(task)
                waiting.append(task)
                while len(running) >= most_running or len(waiting) >= AHEAD:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    _write_ready(batch, waiting)
            while waiting:
                await asyncio.wait([waiting[0]])
                _write_ready(batch, waiting)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _write_ready(batch: Batch, waiting: "deque[asyncio.Task[Answered]]") -> None:
    while waiting and waiting[0].done():
        batch.write(waiting[0].result())
        waiting.popleft()


def _answer_on_ray(options: BatchOptions, address: str, batch: Batch) -> None:
    from specdec.fleet.batch_job import answer_lines, connected, num_gpus
    from specdec.fleet.stage import EngineArgs

    args = EngineArgs(options.target, options.speculation, options.engine, options.server)
    with connected(address):
        num_engines = options.num_engines or (num_gpus() if args.num_gpus else 1)
        if num_engines == 0:
            raise ValueError(f"--ray {address}: no GPU there: give --device cpu")
        print(f"{num_engines} engines on {address}", file=sys.stderr)
        good = [line for line in batch.lines() if line.problem is None]
        with closing(answer_lines(good, args, num_engines)) as answers, batch.writing():
            for line in batch.lines():
                batch.write(next(answers) if line.problem is None else answer_problem(line))
