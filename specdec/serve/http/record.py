"""Token ids of finished requests, a line of JSON each, for training a draft."""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from specdec.requests.output import RequestOutput

logger = logging.getLogger("specdec")


class Record:
    """A new file in `directory`, for its owner alone; ValueError if it cannot be written.

    If it cannot any more, as where a disk is full, the log says so, and nothing more is recorded.
    """

    def __init__(self, directory: Path) -> None:
        self.file = directory / f"requests-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}.jsonl"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._stream = os.fdopen(_private(self.file), "w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"record={str(directory)!r}: {error.strerror}") from error

    def write(self, output: RequestOutput) -> None:
        """Add a request with all its samples."""
        if self._stream.closed:
            return
        samples = [each.token_ids for each in output.outputs]
        line = json.dumps({"prompt_token_ids": output.prompt_token_ids, "token_ids": samples})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except OSError as error:
            logger.error("requests are no longer recorded in %s: %s", self.file, error.strerror)
            self.close()

    def close(self) -> None:
        """Nothing is written after this."""
        with suppress(OSError):  # of a line that was begun, which has been logged
            self._stream.close()


def _private(file: Path) -> int:
    """Open a new file that no other user may read: token ids are what users have written."""
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
