"""Token ids of finished requests, a line of JSON each, for training a draft."""

import json
import time
from pathlib import Path

from specdec.requests.output import RequestOutput


class Record:
    """A new file in `directory`; ValueError if it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / f"requests-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._stream = self.file.open("x", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"record={str(directory)!r}: {error.strerror}") from error

    def write(self, output: RequestOutput) -> None:
        """Add a request with all its samples."""
        samples = [each.token_ids for each in output.outputs]
        line = json.dumps({"prompt_token_ids": output.prompt_token_ids, "token_ids": samples})
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing can be written after this."""
        self._stream.close()
