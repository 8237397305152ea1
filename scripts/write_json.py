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
    command = shlex.join(["python", "-m", script, *sys.argv[1:]])
    run = {"command": command, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if file is not None:
        file.write_text(json.dumps({**run, **found}, indent=1, default=str) + "\n")
    print(json.dumps({**run, **found}, default=str))
