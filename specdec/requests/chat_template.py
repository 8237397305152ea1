"""Conversations to text by a chat template, which is an untrusted program from the checkpoint.

It runs in a process of its own (template_worker.py), started for the first conversation and killed
if a template takes too long or too much memory; the next conversation starts another. Any thread
may call.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from specdec.requests import template_worker as worker

SCRIPT = Path(worker.__file__).resolve()


def check_template(template: str | None) -> None:
    """Raise ValueError for invalid Jinja. None, for the tokenizer's own template, is valid."""
    if template is not None:
        with closing(TemplateProcess()) as process:
            try:
                process.render(template, None)
            except ValueError as error:
                raise ValueError(f"chat_template is no valid Jinja: {error}") from error


class TemplateProcess:
    """Renders templates, one at a time. The process ends with this object or the interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes]], TemplateProcess] | None = None

    def render(
        self, template: str, variables: Mapping[str, object] | None, content_format: str = "auto"
    ) -> str:
        """Render a template; ValueError for its errors, and for too much time or memory.

        variables: None to compile it only.
        """
        request = {"template": template, "variables": variables, "content_format": content_format}
        try:
            data = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            what = "messages may hold text, numbers, lists and dicts only"
            raise ValueError(f"{what}: {error}") from error
        with self._lock:
            process = self._running()
            try:
                answer = _exchange(process, data)
            except BaseException:  # else an interrupted exchange's answer would go to the next one
                self._end()
                raise
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != worker.WRITTEN:
            raise ValueError(text)
        return text

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process; after a fork poll() calls the parent's ended, so another starts."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = _start()
            self._ending = weakref.finalize(self, _end, self._process)
        return self._process

    def _end(self) -> None:
        if self._ending is not None:
            self._ending()
        self._process = self._ending = None


def _start() -> subprocess.Popen[bytes]:
    """Start a bare Python with this one's module path, in a process group that Ctrl-C spares."""
    return subprocess.Popen(
        [sys.executable, "-S", "-P", str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        process_group=0,
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended; the cause is found below
        process.stdin.write(len(request).to_bytes(worker.LENGTH_BYTES) + request)
        process.stdin.flush()
    header = process.stdout.read(worker.LENGTH_BYTES)
    length = int.from_bytes(header)
    answer = process.stdout.read(length)
    if len(header) < worker.LENGTH_BYTES or len(answer) < length:
        raise ValueError(_cause(process.wait()))
    return answer


def _cause(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"it was stopped after {worker.SECONDS:g} s"
    if status == worker.OUT_OF_MEMORY:
        return f"it needs more than {worker.MEMORY_BYTES >> 20} MiB of memory"
    return f"the process that renders it ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # the unread rest of a request
            pipe.close()
