"""`specdec batch`: answer the lines of a file, many at once, in their order.

The output is always a beginning of the whole one, so a run that was stopped goes on behind it.
"""

import asyncio
import fcntl
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from specdec.cli.generate import TextOptions, speculation_of
from specdec.cli.headline import headline
from specdec.cli.serve import GENERATION_CONFIGS, check_choice
from specdec.cli.threads import choose_threads
from specdec.requests.chat_format import ChatFormat
from specdec.serve.async_llm import AsyncLLM
from specdec.serve.http.app import Application
from specdec.serve.http.batch import Answered, BatchLine, BatchStopped, answer_line, read_line
from specdec.serve.http.options import ServerOptions
from weights.bars import bar

AHEAD = 4096  # answers that may wait for an earlier line, in memory
NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(TextOptions):
    """The command's options; see ServerOptions."""

    input: Path
    output: Path
    served_model_names: list[str] | None
    chat_template: str | None
    generation_config: str
    ignore_unknown: bool


def run_batch(options: BatchOptions) -> None:
    """Look at both files, load, answer what is left."""
    check_choice("--generation-config", options.generation_config, GENERATION_CONFIGS)
    ChatFormat(chat_template=options.chat_template)
    speculation = speculation_of(replace(options, sampling={"temperature": None}))
    with _opened(options) as output:
        num_lines = sum(1 for _ in read_lines(options.input))
        num_done = _num_done(options.input, options.output, output)
        if num_done:
            print(f"{options.output}: {num_done} of {num_lines} lines are done", file=sys.stderr)
        if num_done == num_lines:
            return
        with AsyncLLM(options.target, speculation, **options.engine) as llm:
            print(headline(llm.llm), file=sys.stderr)
            choose_threads(llm.llm.engine.runner)
            batch = Batch(llm, options, output, num_lines, num_done)
            try:
                asyncio.run(batch.run())
            except BatchStopped as error:
                print(f"specdec: error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
            finally:
                print(batch.summary(), file=sys.stderr)


@contextmanager
def _opened(options: BatchOptions) -> Iterator[BinaryIO]:
    """The output, for this process alone."""
    with options.output.open("a+b") as output:
        if options.output.samefile(options.input):
            raise ValueError(f"{options.output} is the input too: give another file for the output")
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{options.output}: another process is writing it") from None
        yield output


def read_lines(file: Path) -> Iterator[BatchLine]:
    """The lines of a batch; one whose custom_id an earlier line has is a problem."""
    seen: dict[str, int] = {}
    with file.open("rb") as stream:
        for number, data in enumerate(stream, start=1):
            if not data.strip():
                continue
            line = read_line(data)
            first = seen.setdefault(line.custom_id, number) if line.custom_id else number
            if first != number:
                message = f"custom_id={line.custom_id!r:.100}: line {first} has it too"
                line = BatchLine(line.custom_id, problem=message, code="duplicate_custom_id")
            yield line


def _num_done(source: Path, file: Path, output: BinaryIO) -> int:
    """Lines that are answered. A last line that was not written to its end is removed."""
    output.seek(0)
    count = end = 0
    lines = read_lines(source)
    for data in output:
        if not data.endswith(b"\n"):
            break
        count += 1
        if not _answers(data, next(lines, None)):
            message = f"{file}: line {count} answers no line {count} of {source}"
            raise ValueError(f"{message}: give a new file for the output")
        end += len(data)
    output.truncate(end)
    output.seek(end)
    return count


def _answers(data: bytes, line: BatchLine | None) -> bool:
    try:
        given = json.loads(data)
    except ValueError:
        return False
    keys = {"id", "custom_id", "response", "error"}
    is_answer = isinstance(given, dict) and set(given) == keys
    return is_answer and line is not None and given["custom_id"] == line.custom_id


class Batch:
    """Answers the lines after the first `num_done` ones."""

    def __init__(
        self, llm: AsyncLLM, options: BatchOptions, output: BinaryIO, num_lines: int, num_done: int
    ) -> None:
        names = tuple(options.served_model_names or [options.target])
        self._application = Application(
            llm,
            ServerOptions(
                host="localhost",
                model_names=names,
                chat_template=options.chat_template,
                use_generation_config=options.generation_config == "auto",
                ignore_unknown=options.ignore_unknown,
                max_waiting=NO_LIMIT,
            ),
        )
        self._options = options
        self._output = output
        self._num_lines = num_lines
        self._num_done = num_done
        self._num_errors = self._num_tokens = 0
        self._start = time.monotonic()
        self._bar = bar(desc="answering", total=num_lines, initial=num_done, unit="line")
        # as many lines wait as run, so that the engine never waits for them
        self._most_running = 2 * llm.llm.sizes.max_num_seqs

    async def run(self) -> None:
        """Write the answers in the order of the lines, each as soon as it can be."""
        app = self._application.app
        running: set[asyncio.Task[Answered]] = set()
        waiting: deque[asyncio.Task[Answered]] = deque()  # begun, in order, not written yet
        lines = islice(read_lines(self._options.input), self._num_done, None)
        async with app.router.lifespan_context(app):
            try:
                for line in lines:
                    task = asyncio.create_task(answer_line(app, line))
                    running.add(task)
                    waiting.append(task)
                    while len(running) >= self._most_running or len(waiting) >= AHEAD:
                        running = await _one_ended(running)
                        self._write_ready(waiting)
                while waiting:
                    await asyncio.wait([waiting[0]])
                    self._write_ready(waiting)
            finally:
                self._bar.close()
                for each in waiting:
                    each.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    def _write_ready(self, waiting: "deque[asyncio.Task[Answered]]") -> None:
        while waiting and waiting[0].done():
            self._write(waiting[0].result())
            waiting.popleft()

    def _write(self, answered: Answered) -> None:
        self._output.write(answered.line + b"\n")
        self._output.flush()
        self._num_done += 1
        self._num_errors += answered.is_error
        self._num_tokens += answered.num_tokens
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix({"tokens/s": f"{self._num_tokens / seconds:.0f}"}, refresh=False)
        self._bar.update()

    def summary(self) -> str:
        """What is done, and how to go on where something is left."""
        done = f"{self._num_done} of {self._num_lines} lines in {self._options.output}"
        errors = f", {self._num_errors} of this run's with errors" if self._num_errors else ""
        is_whole = self._num_done == self._num_lines
        return done + errors + ("" if is_whole else "; the same command goes on")


async def _one_ended(running: "set[asyncio.Task[Answered]]") -> "set[asyncio.Task[Answered]]":
    """Wait for one; those that still run."""
    _, rest = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return rest
