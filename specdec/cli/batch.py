"""`specdec batch`: answer the lines of a file, many at once, in their order.

The file of answers is always a beginning of the whole one, so a run that was stopped goes on where
its output ends.
"""

import asyncio
import codecs
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from specdec.cli.before_torch import server_options
from specdec.cli.choices import BatchOptions
from specdec.cli.figures import say_what_runs
from specdec.cli.readers import open_regular
from specdec.serve.async_llm import AsyncLLM
from specdec.serve.http.app import Application
from specdec.serve.http.batch import (
    START,
    Answered,
    BatchLine,
    BatchStopped,
    answer_line,
    answer_problem,
    begins_answer,
    read_line,
)
from specdec.serve.http.options import MAX_BODY_BYTES, NO_LIMIT
from weights.bars import bar

AHEAD = 4096  # answers that may wait for an earlier line, in memory
MOST_LINE = 4 * MAX_BODY_BYTES  # bytes: what is around a body and its escapes included
TOO_LONG = BatchLine(None, problem=f"the line is longer than {MOST_LINE >> 20} MiB")
ANSWER_KEYS = {"id", "custom_id", "response", "error"}


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


def _answer_here(options: BatchOptions, batch: "Batch") -> None:
    with AsyncLLM(options.target, options.speculation, **options.engine) as llm:
        say_what_runs(llm.llm)
        server = replace(server_options(options), host="localhost", max_waiting=NO_LIMIT)
        application = Application(llm, server)
        # as many lines wait as run, so that the engine never waits for them
        most_running = 2 * llm.llm.sizes.max_num_seqs
        with batch.writing():
            asyncio.run(_answer_all(application, batch, most_running))


async def _answer_all(application: Application, batch: "Batch", most_running: int) -> None:
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


def _write_ready(batch: "Batch", waiting: "deque[asyncio.Task[Answered]]") -> None:
    while waiting and waiting[0].done():
        batch.write(waiting[0].result())
        waiting.popleft()


def _answer_on_ray(options: BatchOptions, address: str, batch: "Batch") -> None:
    from specdec.fleet.batch_job import answer_lines, connected, num_gpus
    from specdec.fleet.stage import EngineArgs

    args = EngineArgs(options.target, options.speculation, options.engine, options.server)
    with connected(address):
        found, each = num_gpus(), args.num_gpus
        num_engines = options.num_engines or (found // each if each else 1)
        if num_engines == 0:
            too_few = f"{found} GPUs there, {each} of each engine" if found else "no GPU there"
            raise ValueError(f"--ray {address}: {too_few}: give --device cpu")
        print(f"{num_engines} engines on {address}", file=sys.stderr)
        good = [line for line in batch.lines() if line.problem is None]
        with closing(answer_lines(good, args, num_engines)) as answers, batch.writing():
            for line in batch.lines():
                batch.write(next(answers) if line.problem is None else answer_problem(line))


@contextmanager
def opened(source: Path, file: Path) -> Iterator[BinaryIO]:
    """Open the output `file` for this process alone; both must be regular files."""
    append = os.O_RDWR | os.O_APPEND | os.O_CREAT
    with open_regular(source), open_regular(file, append, "a+b") as output:
        if file.samefile(source):
            raise ValueError(f"{file} is the input too: give another file for the output")
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{file}: another process is writing it") from None
        yield output


class Batch:
    """The lines of a file and their answers: the first `num_done` of `num_lines` are written."""

    def __init__(self, source: Path, file: Path, output: BinaryIO) -> None:
        self.num_lines = sum(1 for _ in read_lines(source))
        self.num_done = _num_done(source, file, output)
        self._source = source
        self._file = file
        self._output = output
        self._num_errors = self._num_tokens = 0

    def lines(self) -> Iterator[BatchLine]:
        """Return those without answers when it is called."""
        return islice(read_lines(self._source), self.num_done, None)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Show how far it is, and at the end what there is; exit code 2 if an engine stopped."""
        self._start = time.monotonic()
        self._bar = bar(desc="answering", total=self.num_lines, initial=self.num_done, unit="line")
        try:
            yield
        except BatchStopped as error:
            self._bar.close()
            print(f"specdec: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        finally:
            self._bar.close()
            done = f"{self.num_done} of {self.num_lines} lines in {self._file}"
            errors = f", {self._num_errors} of this run's with errors" if self._num_errors else ""
            advice = "; the same command goes on" if self.num_done < self.num_lines else ""
            print(f"{done}{errors}{advice}", file=sys.stderr)

    def write(self, answered: Answered) -> None:
        """Append the answer to the next line."""
        self._output.write(answered.line + b"\n")
        self._output.flush()
        self.num_done += 1
        self._num_errors += answered.is_error
        self._num_tokens += answered.num_tokens
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix({"tokens/s": f"{self._num_tokens / seconds:.0f}"}, refresh=False)
        self._bar.update()


def read_lines(file: Path) -> Iterator[BatchLine]:
    """Yield the lines of a batch; one whose custom_id an earlier line has is a problem."""
    seen: dict[str, int] = {}
    with open_regular(file) as stream:
        for number, data in enumerate(_bounded_lines(stream), start=1):
            if not data.strip():
                continue
            line = read_line(data) if len(data) <= MOST_LINE else TOO_LONG
            first = seen.setdefault(line.custom_id, number) if line.custom_id else number
            if first != number:
                message = f"custom_id={line.custom_id!r:.100}: line {first} has it too"
                line = BatchLine(line.custom_id, problem=message, code="duplicate_custom_id")
            yield line


def _bounded_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield each line without a byte order mark, with one byte too many where it is too long."""
    mark = codecs.BOM_UTF8
    while data := stream.readline(MOST_LINE + 1):
        rest = data
        while len(rest) > MOST_LINE and not rest.endswith(b"\n"):
            rest = stream.readline(MOST_LINE + 1)
        yield data.removeprefix(mark)
        mark = b""


def _num_done(source: Path, file: Path, output: BinaryIO) -> int:
    """Count lines that are answered. Remove the beginning of the next one, refuse the rest."""
    count = end = 0
    is_ended = True
    lines = read_lines(source)
    output.seek(0)
    if output.read(1) not in (b"", b"{"):  # before a line of gigabytes is read
        raise _foreign(file, 1, source)
    output.seek(0)
    for data in output:
        line = next(lines, None)
        if not _answers(data, line):
            # without an answer of ours before it, a few bytes do not show whose they are
            is_ours = line is not None and (
                begins_answer(data, line) or (count > 0 and START.startswith(data))
            )
            if is_ours and not data.endswith(b"\n") and _parsed(data) is None:
                break
            raise _foreign(file, count + 1, source)
        count += 1
        end += len(data)
        is_ended = data.endswith(b"\n")
    output.truncate(end)
    output.seek(end)
    output.write(b"" if is_ended else b"\n")
    return count


def _foreign(file: Path, number: int, source: Path) -> ValueError:
    message = f"{file}: line {number} answers no line {number} of {source}"
    return ValueError(f"{message}: give a new file for the output")


def _answers(data: bytes, line: BatchLine | None) -> bool:
    given = _parsed(data)
    if line is None or not isinstance(given, dict):
        return False
    return set(given) == ANSWER_KEYS and given["custom_id"] == line.custom_id


def _parsed(data: bytes) -> object:
    """Read a value of JSON, which no answer that was cut off is; None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
