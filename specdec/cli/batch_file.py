"""A batch file and the file of its answers, which is always a beginning of the whole one.

So a run that was stopped goes on where its output ends.
"""

import codecs
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from specdec.cli.readers import open_regular
from specdec.serve.http.batch import (
    START,
    Answered,
    BatchLine,
    BatchStopped,
    begins_answer,
    read_line,
)
from specdec.serve.http.options import MAX_BODY_BYTES
from weights.bars import bar

MOST_LINE = 4 * MAX_BODY_BYTES  # bytes: what is around a body and its escapes included
TOO_LONG = BatchLine(None, problem=f"the line is longer than {MOST_LINE >> 20} MiB")
ANSWER_KEYS = {"id", "custom_id", "response", "error"}


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
            if line is not None and _is_begun(data, line, count):
                break
            raise _foreign(file, count + 1, source)
        count += 1
        end += len(data)
        is_ended = data.endswith(b"\n")
    output.truncate(end)
    output.seek(end)
    output.write(b"" if is_ended else b"\n")
    return count


def _is_begun(data: bytes, line: BatchLine, count: int) -> bool:
    """Say whether it is an answer of ours that was not written to its end.

    count: lines before it that are ours; without any, a few bytes do not show whose they are.
    """
    is_begun = begins_answer(data, line) or (count > 0 and START.startswith(data))
    return is_begun and not data.endswith(b"\n") and _parsed(data) is None


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
