"""How scripts write what they found: one line of JSON beside the command, and a file on request."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch


def write_json(script: str, found: Mapping[str, object], file: Path | None = None) -> None:
    """Print what a script found, beside its command, as the last line; write it to the file too."""
    print(json.dumps(save_json(script, found, file), default=str))


def save_json(
    script: str, found: Mapping[str, object], file: Path | None = None
) -> dict[str, object]:
    """Write what a script has found so far to the file, beside its command, and return both."""
    command = shlex.join(["python", "-m", script, *sys.argv[1:]])
    run = {"command": command, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if file is not None:
        file.write_text(json.dumps({**run, **found}, indent=1, default=str) + "\n")
    return {**run, **found}
