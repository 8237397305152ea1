"""A batch file and the file of its answers, which is always a beginning of the whole one.

So a run that was stopped goes on where its output ends.
"""

import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from specdec.serve.http.batch import Answered, BatchLine, BatchStopped, read_line
from weights.bars import bar


@contextmanager
def opened(source: Path, file: Path) -> Iterator[BinaryIO]:
    """The output `file`, for this process alone."""
    with file.open("a+b") as output:
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
        """Those without answers when it is called."""
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
            print(self._summary(), file=sys.stderr)

    def write(self, answered: Answered) -> None:
        """The answer to the next line."""
        self._output.write(answered.line + b"\n")
        self._output.flush()
        self.num_done += 1
        self._num_errors += answered.is_error
        self._num_tokens += answered.num_tokens
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix({"tokens/s": f"{self._num_tokens / seconds:.0f}"}, refresh=False)
        self._bar.update()

    def _summary(self) -> str:
        """What is done, and how to go on where something is left."""
        done = f"{self.num_done} of {self.num_lines} lines in {self._file}"
        errors = f", {self._num_errors} of this run's with errors" if self._num_errors else ""
        is_whole = self.num_done == self.num_lines
        return done + errors + ("" if is_whole else "; the same command goes on")


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
